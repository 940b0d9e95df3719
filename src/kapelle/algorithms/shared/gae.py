"""Credit by GAE (1506.02438): over tokens or over turns, along an agent's own turns or one chain through all.

Own path: each agent's turns in a row; turns of others between them are no steps. Chain (MARFT, 2504.16129): all
turns of the episode in global time order, so that an agent's value is backed up from the next agent's.

Rewards are placed on the last token of a turn. γ (`gamma_turn`) counts turns of the path: inside a completion it is
`gamma_token` = 1 unless set. The KL penalty in the reward is −β·(log π_b − log π_ref) per token (k1, unbiased).
Where the path's last turn was cut by a limit, the critic's value after it takes the place of the future.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Credit
from kapelle.algorithms.shared.rewards import RewardSource
from kapelle.functional.advantages import CriticAdvantage, gae, vtrace
from kapelle.functional.masking import segment_whiten
from kapelle.functional.shaping import kl_in_reward
from kapelle.rows import Signals, TurnKey, turns_of
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.settings.base import Settings
from kapelle.types import Group, Turn


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
    """What a turn that ran into a limit is followed by: the critic's value of going on, or nothing."""
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
    bootstrap: Tensor


class GAECredit:
    """Advantages and value targets for every turn that is trained on."""

    def __init__(self, settings: GAEConfig, rewards: RewardSource, *, chain: bool = False) -> None:
        """Take the rewards of turns, on a path per agent or (`chain`) on one through all agents."""
        self._settings = settings
        self._rewards = rewards
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
        return credit

    def _estimate(self, rows: Sequence[_Row], mask_NT: Tensor) -> CriticAdvantage:
        pad = torch.nn.utils.rnn.pad_sequence
        reward_NT = pad([row.reward_T for row in rows], batch_first=True)
        value_NT = pad([row.value_T for row in rows], batch_first=True)
        gamma_NT = pad([row.gamma_T for row in rows], batch_first=True)
        bootstrap_N = torch.stack([row.bootstrap for row in rows])
        lam = self._settings.lam
        if not self._settings.vtrace:
            return gae(reward_NT, value_NT, mask_NT, bootstrap_N, gamma=gamma_NT, lam=lam)
        ratio_NT = pad([row.log_ratio_T for row in rows], batch_first=True)
        rows_NT = (ratio_NT, reward_NT, value_NT, mask_NT)
        # The surrogate multiplies by ρ: an advantage that carried ρ̄ too would weigh importance twice.
        return vtrace(*rows_NT, bootstrap_N, gamma=gamma_NT, lam=lam, clip_policy_rho=None)

    def _rows(self, groups: Sequence[Group], signals: Signals) -> list[_Row]:
        paths: dict[tuple[int, int, str], list[tuple[TurnKey, Turn]]] = {}
        for key, turn in turns_of(groups):
            whose = "" if self._chain else turn.agent
            paths.setdefault((key.group, key.episode, whose), []).append((key, turn))
        rows = []
        for (g, e, _), pairs in paths.items():
            given = self._rewards((g, e), groups[g].episodes[e], signals)
            rows.append(self._row(pairs, given, signals))
        return rows

    def _row(
        self, pairs: Sequence[tuple[TurnKey, Turn]], rewards: Mapping[int, float], signals: Signals
    ) -> _Row:
        pieces = [self._turn(key, turn, rewards[turn.index], signals) for key, turn in pairs]
        last = pairs[-1][0]
        cut = self._settings.truncated == "bootstrap" and last in signals.bootstrap
        return _Row(
            turns=tuple(pairs),
            steps=tuple(len(reward_T) for reward_T, _, _ in pieces),
            reward_T=torch.cat([reward_T for reward_T, _, _ in pieces]),
            value_T=torch.cat([signals.values[key] for key, _ in pairs]),
            gamma_T=torch.cat([gamma_T for _, gamma_T, _ in pieces]),
            log_ratio_T=torch.cat([log_ratio_T for _, _, log_ratio_T in pieces]),
            bootstrap=signals.bootstrap[last] if cut else torch.zeros(()),
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
