"""Credit by GAE (1506.02438): over tokens or over turns, along an agent's own turns or one chain through all.

Own path: each agent's turns in a row; turns of others between them are no steps. Chain (MARFT, 2504.16129): all
turns of the episode in global time order, so that an agent's value is backed up from the next agent's.

Rewards are placed on the last token of a turn. γ (`gamma_turn`) counts turns of the path: inside a completion it is
`gamma_token` = 1 unless set. The KL penalty in the reward is −β·(log π_b − log π_ref) per token (k1, unbiased).

A limit that cuts an episode short ends no game. There the critic's value *after* an agent's last turn, U, takes the place of
all that came or would have come once that turn was over: what others' moves paid it since, the terminal reward, and its own
next turns. The critic learns U from every turn that was followed by another one of the path, or by moves of others that ended
the game: U's target is the turn's later pay plus γ_turn times the target at the path's next turn. So nothing is counted
twice and nothing is left out, in any order of moves. A turn that ended the game itself teaches U nothing: a cut tells that
the game goes on. Where no turn of the agent teaches it in this step, a cut counts as the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Credit
from kapelle.algorithms.shared.rewards import over
from kapelle.functional.advantages import CriticAdvantage, gae, vtrace
from kapelle.functional.masking import segment_whiten
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
    """What follows the last turn of an episode that a limit cut short: the critic's value of going on, or nothing."""
    kl_in_reward: float = Field(default=0.0, ge=0.0)
    """β of the per-token penalty to the reference policy."""
    vtrace: bool = False
    """Correct values, and the future part of advantages, for samples of older weights (1802.01561). The step's
    own ρ is the loss's."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One path, step by step."""

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

    def bootstrapped(self, after: Tensor) -> _Row:
        """Return the path with U in place of what its last turn was paid later."""
        reward_T = self.reward_T.clone()
        reward_T[-1] += after - self.later[-1]
        return replace(self, reward_T=reward_T)

    @property
    def teaches(self) -> tuple[tuple[TurnKey, Turn], ...]:
        """The turns after which it is known what was to come."""
        return self.turns if self.followed and not self.cut else self.turns[:-1]

    def targets_after(self, target_T: Tensor, gamma_turn: float) -> list[Tensor]:
        """Return the target of U after each of the turns that teach it."""
        first = list(itertools.accumulate(self.steps, initial=0))
        following = [*target_T[first[1:-1]], torch.zeros_like(target_T[0])]
        return [
            paid + gamma_turn * to_come
            for paid, to_come, _ in zip(self.later, following, self.teaches, strict=False)
        ]


def _nothing_later(episode: Episode) -> Mapping[int, float]:
    return {}


class GAECredit:
    """Advantages and value targets for every turn that is trained on."""

    def __init__(
        self,
        settings: GAEConfig,
        rewards: Callable[[Sequence[Group], Signals], Mapping[TurnKey, float]],
        later: Callable[[Episode], Mapping[int, float]] = _nothing_later,
        *,
        chain: bool = False,
    ) -> None:
        """Take what gives the rewards of a step's turns, on a path per agent or (`chain`) on one through all agents.

        `later` is the part of an episode's that fell when the turn was over, by the turn's index.
        """
        self._settings = settings
        self._rewards = rewards
        self._later = later
        self._chain = chain

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return each turn's advantage at every token, and the critic's target at each of its values."""
        rows = self._rows(groups, signals)
        if not rows:
            return {}
        pad = torch.nn.utils.rnn.pad_sequence
        mask_NT = pad([torch.ones_like(row.reward_T) for row in rows], batch_first=True)
        estimate = self._estimate(rows, mask_NT)
        advantage_NT = self._normalise(estimate.advantage_NT, mask_NT, rows)
        credit: dict[TurnKey, Credit] = {}
        for row, advantage_T, target_T in zip(rows, advantage_NT, estimate.target_NT, strict=True):
            total = sum(row.steps)
            pieces = zip(advantage_T[:total].split(row.steps), target_T[:total].split(row.steps), strict=True)
            for (key, turn), (a_T, r_T) in zip(row.turns, pieces, strict=True):
                everywhere = a_T if self._settings.unit == "token" else a_T.expand(len(turn.completion_ids))
                credit[key] = Credit(everywhere, r_T)
            if signals.after:
                known = row.targets_after(target_T, self._settings.gamma_turn)
                for (key, _), after in zip(row.teaches, known, strict=True):
                    credit[key] = replace(credit[key], after=after)
        return credit

    def _estimate(self, rows: Sequence[_Row], mask_NT: Tensor) -> CriticAdvantage:
        pad = torch.nn.utils.rnn.pad_sequence
        reward_NT = pad([row.reward_T for row in rows], batch_first=True)
        value_NT = pad([row.value_T for row in rows], batch_first=True)
        gamma_NT = pad([row.gamma_T for row in rows], batch_first=True)
        # U has been discounted to the end of the turn that it follows, and is part of what the turn earns.
        bootstrap_N = torch.zeros(len(rows))
        lam = self._settings.lam
        if not self._settings.vtrace:
            return gae(reward_NT, value_NT, mask_NT, bootstrap_N, gamma=gamma_NT, lam=lam)
        ratio_NT = pad([row.log_ratio_T for row in rows], batch_first=True)
        rows_NT = (ratio_NT, reward_NT, value_NT, mask_NT)
        # The surrogate multiplies by ρ: an advantage that carried ρ̄ too would weigh importance twice.
        return vtrace(*rows_NT, bootstrap_N, gamma=gamma_NT, lam=lam, clip_policy_rho=None)

    def _rows(self, groups: Sequence[Group], signals: Signals) -> list[_Row]:
        reward = self._rewards(groups, signals)
        paths: dict[tuple[int, int, str], list[tuple[TurnKey, Turn]]] = {}
        for key, turn in turns_of(groups):
            whose = "" if self._chain else turn.agent
            paths.setdefault((key.group, key.episode, whose), []).append((key, turn))
        rows = []
        for (g, e, whose), pairs in paths.items():
            rows.append(self._row(pairs, groups[g].episodes[e], whose, reward, signals))
        if not signals.bootstrap or self._settings.truncated == "terminate" or not self._settings.gamma_turn:
            return rows
        # Moves of others before a cut did not end those games, and U averages over all moves. Paths of the same length that
        # such moves did end therefore count as cut too: what they were paid is one of the cases that U stands for.
        overtaken = {row.like for row in rows if row.cut and row.followed}
        rows = [replace(row, cut=row.cut or (row.followed and row.like in overtaken)) for row in rows]
        taught = {turn.agent for row in rows for _, turn in row.teaches}
        known = {**signals.after, **signals.bootstrap}
        return [
            row.bootstrapped(known[row.turns[-1][0]]) if row.cut and row.turns[-1][1].agent in taught else row
            for row in rows
        ]

    def _row(
        self,
        pairs: Sequence[tuple[TurnKey, Turn]],
        episode: Episode,
        whose: str,
        reward: Mapping[TurnKey, float],
        signals: Signals,
    ) -> _Row:
        pieces = [self._turn(key, turn, reward[key], signals) for key, turn in pairs]
        later = self._later(episode)
        return _Row(
            turns=tuple(pairs),
            steps=tuple(len(reward_T) for reward_T, _, _ in pieces),
            reward_T=torch.cat([reward_T for reward_T, _, _ in pieces]),
            value_T=torch.cat([signals.values[key] for key, _ in pairs]),
            gamma_T=torch.cat([gamma_T for _, gamma_T, _ in pieces]),
            log_ratio_T=torch.cat([log_ratio_T for _, _, log_ratio_T in pieces]),
            later=tuple(later.get(turn.index, 0.0) for _, turn in pairs),
            cut=episode.truncated,
            followed=over(episode, pairs[-1][1]) < len(episode.turns),
            like=(episode.task.part, whose, len(pairs)),
        )

    def _turn(
        self, key: TurnKey, turn: Turn, reward: float, signals: Signals
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rewards, discounts and log-ratios (trainer over sampler) of a turn's steps."""
        settings = self._settings
        reward_T = torch.zeros(len(turn.completion_ids))
        if settings.kl_in_reward:
            logp_T = torch.tensor(turn.logprobs)
            reward_T += kl_in_reward(logp_T, signals.reference[key], beta=settings.kl_in_reward)
        reward_T[-1] += reward
        gamma_T = torch.full_like(reward_T, settings.gamma_token)
        gamma_T[-1] = settings.gamma_turn
        log_ratio_T = torch.zeros_like(reward_T)
        if key in signals.proximal:
            log_ratio_T = signals.proximal[key] - torch.tensor(turn.logprobs)
        if settings.unit == "turn":
            return reward_T.sum()[None], gamma_T[-1:], log_ratio_T.sum()[None]
        return reward_T, gamma_T, log_ratio_T

    def _normalise(self, advantage_NT: Tensor, mask_NT: Tensor, rows: Sequence[_Row]) -> Tensor:
        how = self._settings.normalise
        if how == "none":
            return advantage_NT
        numbers: dict[str, int] = {}
        segment_NT = torch.zeros(mask_NT.shape, dtype=torch.int64)
        for n, row in enumerate(rows):
            start = 0
            for (_, turn), steps in zip(row.turns, row.steps, strict=True):
                whose = {"policy": turn.policy, "agent": turn.agent, "batch": ""}[how]
                segment_NT[n, start : start + steps] = numbers.setdefault(whose, len(numbers))
                start += steps
        flat = segment_whiten(advantage_NT.flatten(), mask_NT.flatten(), segment_NT.flatten(), len(numbers))
        return flat.view_as(advantage_NT)
