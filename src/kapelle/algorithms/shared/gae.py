"""Generalised advantage estimation (GAE, arXiv:1506.02438) over tokens or turns.

A path is the sequence of turns along which values are backed up:

- one path per agent: the turns of the agent, without the turns of other agents;
- one chain (MARFT, arXiv:2504.16129): all turns of the episode in global time order, so that an agent's value is backed up
  from the next agent's value.

The reward of a turn is placed on its last token. The discount γ between turns of a path is `gamma_turn`; the discount inside
a completion is `gamma_token` (default: 1). The KL penalty in the reward is −β·(log π_b − log π_ref) per token (k1, unbiased).

Truncation. If an episode ended at a limit, its future is unknown. Let U be the critic's value *after* the last turn of an
agent. U replaces everything after the end of that turn: rewards from moves of other agents, the terminal reward, and later
turns of the agent. Every reward therefore counts once, in any order of moves.

The target of U after a turn is the part of the turn's reward that was given after the end of the turn, plus γ_turn times the
value target at the next turn of the path. A turn has a target for U if another turn of the path follows, or if moves of other
agents ended the episode after the turn. A turn that ended the episode itself has no target for U, because a truncated game
would have continued. If no turn of an agent has a target in a step, the agent's truncated episodes are treated as terminated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Credit
from kapelle.algorithms.shared.rewards import count_ended
from kapelle.functional.advantages import gae, vtrace
from kapelle.functional.masking import pack, segment_whiten
from kapelle.functional.shaping import kl_in_reward
from kapelle.rows import Signals, TurnKey, turns_of
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.settings.base import Settings
from kapelle.types import Episode, Group, Turn


class GAEConfig(Settings):
    """Settings of GAE (generalised advantage estimation), which computes advantages from rewards and values."""

    gamma_turn: float = Field(default=1.0, ge=0.0, le=1.0)
    """The discount from one turn to the next turn of the path."""
    gamma_token: float = Field(default=1.0, ge=0.0, le=1.0)
    """The discount from one token to the next token of a completion."""
    lam: float = Field(default=0.95, ge=0.0, le=1.0)
    """λ of GAE, per step. A step is a token, or a turn with `unit: turn`."""
    unit: Literal["token", "turn"] = "token"
    """The unit of a step: the critic estimates one value before every token (`token`), or one value before every turn
    (`turn`)."""
    normalise: Literal["policy", "agent", "batch", "none"] = "policy"
    """The set of turns over which the advantages of an update are whitened: those of one policy, those of one agent, all
    (`batch`), or no whitening (`none`)."""
    truncated: Literal["bootstrap", "terminate"] = "bootstrap"
    """The value after the last turn of a truncated episode: the critic's value (`bootstrap`), or 0 (`terminate`)."""
    kl_in_reward: float = Field(default=0.0, ge=0.0)
    """β, the coefficient of the per-token KL penalty to the reference policy."""
    vtrace: bool = False
    """Whether values and later advantages are corrected by V-trace for samples from older weights (arXiv:1802.01561). The
    importance ratio ρ of the current step is applied in the loss."""


@dataclass(frozen=True, slots=True)
class _Path:
    """One path of an episode, with a reward, value and discount per step. A step is a token or a turn."""

    turns: tuple[tuple[TurnKey, Turn], ...]
    steps: tuple[int, ...]
    """The number of steps of each turn."""
    reward_T: Tensor
    value_T: Tensor
    gamma_T: Tensor
    log_ratio_T: Tensor
    later: tuple[float, ...]
    """The part of each turn's reward that was given after the end of the turn."""
    cut: bool
    """Whether the episode was truncated. If the episode was truncated, U replaces everything after the last turn."""
    followed: bool
    """Whether other agents moved after the last turn of the path."""
    like: tuple[str, str, int]
    """A key of the game, the owner of the path and the number of turns. A turn limit ends paths with the same key at the same
    point."""

    @property
    def with_target(self) -> tuple[tuple[TurnKey, Turn], ...]:
        """The turns after which U has a target."""
        return self.turns if self.followed and not self.cut else self.turns[:-1]


class GAECredit:
    """A credit function that computes advantages and value targets for every trained turn by GAE."""

    def __init__(
        self,
        settings: GAEConfig,
        rewards: Callable[[Sequence[Group], Signals], Mapping[TurnKey, float]],
        later: Callable[[Episode], Mapping[int, float]] | None = None,
        *,
        chain: bool = False,
    ) -> None:
        """Create the credit function.

        Values are backed up along one path per agent, or along one path for all agents if `chain` is true. The function
        `rewards` returns the rewards of a step by turn. The function `later` returns, by the index of a turn, the part of the
        reward that was given after the end of the turn; None means that there is no such part.
        """
        self._settings = settings
        self._rewards = rewards
        self._later = later
        self._chain = chain

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return the advantage of each turn at every token, and the target of the critic for each value."""
        s = self._settings
        paths = self._paths(groups, signals)
        if not paths:
            return {}
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        reward_NT, value_NT = pad([path.reward_T for path in paths]), pad([path.value_T for path in paths])
        gamma_NT, ratio_NT = pad([path.gamma_T for path in paths]), pad([path.log_ratio_T for path in paths])
        mask_NT = pad([torch.ones_like(path.reward_T) for path in paths])
        # `_paths` has added U to the reward of the last turn, discounted to the end of that turn.
        bootstrap_N = torch.zeros(len(paths))
        if s.vtrace:
            # The surrogate multiplies by ρ itself. With ρ̄ in the advantage too, the ratio would count twice.
            rows_NT = (ratio_NT, reward_NT, value_NT, mask_NT)
            estimate = vtrace(*rows_NT, bootstrap_N, gamma=gamma_NT, lam=s.lam, clip_policy_rho=None)
        else:
            estimate = gae(reward_NT, value_NT, mask_NT, bootstrap_N, gamma=gamma_NT, lam=s.lam)
        turns = [turn for path in paths for _, turn in path.turns]
        steps = [count for path in paths for count in path.steps]
        advantage_K = normalised(pack(estimate.advantage_NT, mask_NT), turns, steps, s.normalise)
        advantages = iter(advantage_K.split(steps))
        credit: dict[TurnKey, Credit] = {}
        for path, target_T in zip(paths, estimate.target_NT, strict=True):
            targets = target_T[: sum(path.steps)].split(path.steps)
            for (key, turn), turn_target_T in zip(path.turns, targets, strict=True):
                advantage_T = next(advantages)
                if s.unit == "turn":
                    advantage_T = advantage_T.expand(len(turn.completion_ids))
                credit[key] = Credit(advantage_T, turn_target_T)
            if signals.after:
                # Target of U after a turn: the later part of its reward, plus γ times the target at the path's next turn.
                first = list(itertools.accumulate(path.steps, initial=0))
                following = [*target_T[first[1:-1]], torch.zeros_like(target_T[0])]
                for (key, _), later, target in zip(path.with_target, path.later, following, strict=False):
                    credit[key] = replace(credit[key], after=later + s.gamma_turn * target)
        return credit

    def _paths(self, groups: Sequence[Group], signals: Signals) -> list[_Path]:
        """Return the paths of the step. In truncated paths, U replaces the future."""
        s = self._settings
        reward = self._rewards(groups, signals)
        turns_on: dict[tuple[int, int, str], list[tuple[TurnKey, Turn]]] = {}
        for key, turn in turns_of(groups):
            owner = "" if self._chain else turn.agent
            turns_on.setdefault((key.group, key.episode, owner), []).append((key, turn))
        paths: list[_Path] = []
        for (g, e, owner), pairs in turns_on.items():
            episode = groups[g].episodes[e]
            later = {} if self._later is None else self._later(episode)
            columns = [self._columns(key, turn, reward[key], signals) for key, turn in pairs]
            rewards, gammas, log_ratios = zip(*columns, strict=True)
            path = _Path(
                turns=tuple(pairs),
                steps=tuple(len(reward_T) for reward_T in rewards),
                reward_T=torch.cat(rewards),
                value_T=torch.cat([signals.values[key] for key, _ in pairs]),
                gamma_T=torch.cat(gammas),
                log_ratio_T=torch.cat(log_ratios),
                later=tuple(later.get(turn.index, 0.0) for _, turn in pairs),
                cut=episode.truncated,
                followed=count_ended(episode, pairs[-1][1]) < len(episode.turns),
                like=(episode.task.part, owner, len(pairs)),
            )
            paths.append(path)
        if not signals.bootstrap or s.truncated == "terminate" or not s.gamma_turn:
            return paths
        # U is an average over all moves of other agents. In truncated episodes such moves did not end the game. Paths of
        # the same length that such moves did end belong to the cases over which U averages, so they count as truncated too.
        overtaken = {path.like for path in paths if path.cut and path.followed}
        paths = [replace(path, cut=path.cut or (path.followed and path.like in overtaken)) for path in paths]
        has_target = {turn.agent for path in paths for _, turn in path.with_target}
        after = {**signals.after, **signals.bootstrap}
        for path in paths:
            key, turn = path.turns[-1]
            if path.cut and turn.agent in has_target:
                path.reward_T[-1] += after[key] - path.later[-1]
        return paths

    def _columns(
        self, key: TurnKey, turn: Turn, reward: float, signals: Signals
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rewards, discounts and log-ratios of the steps of a turn."""
        s = self._settings
        reward_T = torch.zeros(len(turn.completion_ids))
        if s.kl_in_reward:
            reward_T += kl_in_reward(torch.tensor(turn.logprobs), signals.reference[key], beta=s.kl_in_reward)
        reward_T[-1] += reward
        gamma_T = torch.full_like(reward_T, s.gamma_token)
        gamma_T[-1] = s.gamma_turn
        log_ratio_T = torch.zeros_like(reward_T)
        if key in signals.proximal:
            log_ratio_T = signals.proximal[key] - torch.tensor(turn.logprobs)
        if s.unit == "turn":
            return reward_T.sum()[None], gamma_T[-1:], log_ratio_T.sum()[None]
        return reward_T, gamma_T, log_ratio_T


def normalised(
    advantage_K: Tensor,
    turns: Sequence[Turn],
    steps: Sequence[int],
    over: Literal["policy", "agent", "batch", "none"],
) -> Tensor:
    """Return the advantages of all steps of the given turns, whitened over the steps of each policy, of each agent, or of all turns."""
    if over == "none":
        return advantage_K
    numbers: dict[str, int] = {}
    names = [{"policy": turn.policy, "agent": turn.agent, "batch": ""}[over] for turn in turns]
    segment_U = torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])
    segment_K = segment_U.repeat_interleave(torch.tensor(steps))
    return segment_whiten(advantage_K, torch.ones_like(advantage_K), segment_K, len(numbers))
