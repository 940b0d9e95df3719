"""Credit by GAE (1506.02438): over tokens or over turns, along an agent's own turns or one chain through all.

Own path: each agent's turns in a row, skipping those of others. Chain (MARFT, 2504.16129): all
turns of the episode in global time order, so that an agent's value is backed up from the next agent's.

Rewards are placed on the last token of a turn. γ (`gamma_turn`) counts turns of the path: inside a completion it is
`gamma_token` = 1 unless set. The KL penalty in the reward is −β·(log π_b − log π_ref) per token (k1, unbiased).

An episode that a limit cut short would have gone on. There the critic's value *after* an agent's last turn, U, takes the place of
all that came or would have come once that turn was over: what others' moves paid it since, the terminal reward, and its own
next turns. The critic learns U from every turn that was followed by another one of the path, or by moves of others that ended
the game: U's target is the turn's later pay plus γ_turn times the target at the path's next turn. So everything
is counted once, in any order of moves. A turn that ended the game itself is left out of U's targets, since after a cut the
game goes on. If none of the agent's turns gives U a target in this step, a cut counts as the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Credit
from kapelle.algorithms.shared.rewards import over
from kapelle.functional.advantages import gae, vtrace
from kapelle.functional.masking import pack, segment_whiten
from kapelle.functional.shaping import kl_in_reward
from kapelle.rows import Signals, TurnKey, turns_of
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.settings.base import Settings
from kapelle.types import Episode, Group, Turn


class GAEConfig(Settings):
    """How returns and values become advantages."""

    gamma_turn: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount from one turn of the path to the next."""
    gamma_token: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount from one token to the next inside a completion."""
    lam: float = Field(default=0.95, ge=0.0, le=1.0)
    """λ of GAE, per step: tokens, or turns with `unit: turn`."""
    unit: Literal["token", "turn"] = "token"
    """A value before every token, or one before every turn."""
    normalise: Literal["policy", "agent", "batch", "none"] = "policy"
    """Over whose steps of the update advantages are whitened."""
    truncated: Literal["bootstrap", "terminate"] = "bootstrap"
    """What follows the last turn of an episode that a limit cut short: the critic's value after it, or nothing."""
    kl_in_reward: float = Field(default=0.0, ge=0.0)
    """β of the per-token penalty to the reference policy."""
    vtrace: bool = False
    """Correct values, and the future part of advantages, for samples of older weights (1802.01561). The step's
    own ρ is the loss's."""


@dataclass(frozen=True, slots=True)
class _Path:
    """One agent's turns of an episode, or with `chain` those of all agents, step by step."""

    turns: tuple[tuple[TurnKey, Turn], ...]
    steps: tuple[int, ...]
    """How many steps each turn has."""
    reward_T: Tensor
    value_T: Tensor
    gamma_T: Tensor
    log_ratio_T: Tensor
    later: tuple[float, ...]
    """What each turn was paid when it was over."""
    cut: bool
    """Whether U stands for what came after the last turn: a limit cut the episode short."""
    followed: bool
    """Whether others moved after the last turn."""
    like: tuple[str, str, int]
    """Game, whose path, and how many turns it has: paths that a limit of turns leaves at the same place."""

    @property
    def teaches(self) -> tuple[tuple[TurnKey, Turn], ...]:
        """The turns after which it is known what was to come."""
        return self.turns if self.followed and not self.cut else self.turns[:-1]


class GAECredit:
    """Advantages and value targets for every turn that is trained on."""

    def __init__(
        self,
        settings: GAEConfig,
        rewards: Callable[[Sequence[Group], Signals], Mapping[TurnKey, float]],
        later: Callable[[Episode], Mapping[int, float]] | None = None,
        *,
        chain: bool = False,
    ) -> None:
        """Take what gives the rewards of a step's turns, on a path per agent or (`chain`) on one through all agents.

        `later` gives the part of an episode's rewards that turns were paid after they were over, by the turn's index; None
        where nothing was.
        """
        self._settings = settings
        self._rewards = rewards
        self._later = later
        self._chain = chain

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return each turn's advantage at every token, and the critic's target at each of its values."""
        s = self._settings
        paths = self._paths(groups, signals)
        if not paths:
            return {}
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        reward_NT, value_NT = pad([path.reward_T for path in paths]), pad([path.value_T for path in paths])
        gamma_NT, ratio_NT = pad([path.gamma_T for path in paths]), pad([path.log_ratio_T for path in paths])
        mask_NT = pad([torch.ones_like(path.reward_T) for path in paths])
        # U has been discounted to the end of the turn that it follows, and is part of what the turn earns.
        bootstrap_N = torch.zeros(len(paths))
        if s.vtrace:
            # The surrogate multiplies by ρ: an advantage that carried ρ̄ too would weigh importance twice.
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
                # The target of U after a turn: what the turn was paid later, and the target at the path's next turn.
                first = list(itertools.accumulate(path.steps, initial=0))
                following = [*target_T[first[1:-1]], torch.zeros_like(target_T[0])]
                for (key, _), paid, to_come in zip(path.teaches, path.later, following, strict=False):
                    credit[key] = replace(credit[key], after=paid + s.gamma_turn * to_come)
        return credit

    def _paths(self, groups: Sequence[Group], signals: Signals) -> list[_Path]:
        """Return the step's paths, with U in place of what was paid after the last turn of those that were cut short."""
        s = self._settings
        reward = self._rewards(groups, signals)
        turns_on: dict[tuple[int, int, str], list[tuple[TurnKey, Turn]]] = {}
        for key, turn in turns_of(groups):
            whose = "" if self._chain else turn.agent
            turns_on.setdefault((key.group, key.episode, whose), []).append((key, turn))
        paths: list[_Path] = []
        for (g, e, whose), pairs in turns_on.items():
            episode = groups[g].episodes[e]
            later = {} if self._later is None else self._later(episode)
            rewards: list[Tensor] = []
            gammas: list[Tensor] = []
            log_ratios: list[Tensor] = []
            for key, turn in pairs:
                reward_T = torch.zeros(len(turn.completion_ids))
                if s.kl_in_reward:
                    logp_T = torch.tensor(turn.logprobs)
                    reward_T += kl_in_reward(logp_T, signals.reference[key], beta=s.kl_in_reward)
                reward_T[-1] += reward[key]
                gamma_T = torch.full_like(reward_T, s.gamma_token)
                gamma_T[-1] = s.gamma_turn
                log_ratio_T = torch.zeros_like(reward_T)
                if key in signals.proximal:
                    log_ratio_T = signals.proximal[key] - torch.tensor(turn.logprobs)
                if s.unit == "turn":
                    reward_T, gamma_T, log_ratio_T = (
                        reward_T.sum()[None],
                        gamma_T[-1:],
                        log_ratio_T.sum()[None],
                    )
                rewards.append(reward_T)
                gammas.append(gamma_T)
                log_ratios.append(log_ratio_T)
            path = _Path(
                turns=tuple(pairs),
                steps=tuple(len(reward_T) for reward_T in rewards),
                reward_T=torch.cat(rewards),
                value_T=torch.cat([signals.values[key] for key, _ in pairs]),
                gamma_T=torch.cat(gammas),
                log_ratio_T=torch.cat(log_ratios),
                later=tuple(later.get(turn.index, 0.0) for _, turn in pairs),
                cut=episode.truncated,
                followed=over(episode, pairs[-1][1]) < len(episode.turns),
                like=(episode.task.part, whose, len(pairs)),
            )
            paths.append(path)
        if not signals.bootstrap or s.truncated == "terminate" or not s.gamma_turn:
            return paths
        # Moves of others before a cut did not end those games, and U averages over all moves. Paths of the same length that
        # such moves did end therefore count as cut too: what they were paid is one of the cases that U stands for.
        overtaken = {path.like for path in paths if path.cut and path.followed}
        paths = [replace(path, cut=path.cut or (path.followed and path.like in overtaken)) for path in paths]
        taught = {turn.agent for path in paths for _, turn in path.teaches}
        known = {**signals.after, **signals.bootstrap}
        for path in paths:
            if path.cut and path.turns[-1][1].agent in taught:
                path.reward_T[-1] += known[path.turns[-1][0]] - path.later[-1]
        return paths


def normalised(
    advantage_K: Tensor,
    turns: Sequence[Turn],
    steps: Sequence[int],
    over: Literal["policy", "agent", "batch", "none"],
) -> Tensor:
    """Return the advantages of these turns' steps, whitened over each policy's, each agent's or all steps."""
    if over == "none":
        return advantage_K
    numbers: dict[str, int] = {}
    whose = [{"policy": turn.policy, "agent": turn.agent, "batch": ""}[over] for turn in turns]
    segment_U = torch.tensor([numbers.setdefault(name, len(numbers)) for name in whose])
    segment_K = segment_U.repeat_interleave(torch.tensor(steps))
    return segment_whiten(advantage_K, torch.ones_like(advantage_K), segment_K, len(numbers))
