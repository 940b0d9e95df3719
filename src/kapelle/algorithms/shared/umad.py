"""UMAD's terms for any algorithm: a factor on the advantages of confident turns, and a reward for influence (arXiv:2603.01221).

- *Confidence*: the advantage A is multiplied by exp(−α·z), where z is the mean negative log-likelihood (NLL) of the turn in
  nats per token at sampling. The value z is standardised over turns of the same agent with the same number in the episodes of
  the task. Confident turns therefore have more effect on the update, for positive and for negative advantages.
- *Relative*: the advantage A is multiplied by exp(−α·(NLL_i − mean NLL of the other agents in the round)).
- *Influence*: the reward of a turn increases by η times the sign of the mean change of the other agents' rewards from this
  round to the next. The changes are computed from rewards before any shaping, so that the result does not depend on the order
  of the terms.

The influence term uses the first available reward of a turn: its score, if the workflow scores turns (`score_rounds` of a
debate); the score of a verifier; the environment's reward. For a debate that is rewarded only at its end, a score of the
workflow or of a verifier is required.

Round k consists of the k-th turns of all agents that have one. By default, all three terms are off (0).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from pydantic import Field

from kapelle.algorithm import Credit, CreditFunction
from kapelle.algorithms.shared.groups import valid_episodes
from kapelle.errors import ConfigError
from kapelle.functional.shaping import confidence_gain, relative_confidence_gain, umad_influence
from kapelle.rows import Signals, TurnKey, in_rounds
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.settings.base import Settings
from kapelle.team import Team
from kapelle.types import Episode, Group, Turn

S = TypeVar("S", bound=Settings)


class UMADConfig(Settings):
    """Weights of UMAD's terms. A weight of 0 turns a term off."""

    confidence: float = Field(default=0.0, ge=0.0)
    """α of the confidence factor, in which a turn is compared with turns of the same agent in the other episodes of the task."""
    relative: float = Field(default=0.0, ge=0.0)
    """α of the relative confidence factor, in which a turn is compared with the turns of the other agents in the round."""
    influence: float = Field(default=0.0, ge=0.0)
    """η, the size of the influence reward, in units of reward."""

    @property
    def active(self) -> bool:
        """Whether at least one of the terms is on."""
        return bool(self.confidence or self.relative or self.influence)

    def with_influence(
        self, reward: Mapping[TurnKey, float], groups: Sequence[Group], signals: Signals
    ) -> Mapping[TurnKey, float]:
        """Return the reward of each turn of a step plus its influence reward."""
        if not self.influence:
            return reward
        moved = {
            TurnKey(g, e, index): value
            for g, e, episode in valid_episodes(groups)
            for index, value in influence((g, e), episode, signals, self.influence).items()
        }
        return {key: value + moved.get(key, 0.0) for key, value in reward.items()}

    def gained_credit(
        self, credit: CreditFunction, groups: Sequence[Group], signals: Signals
    ) -> Mapping[TurnKey, Credit]:
        """Return the credit that the function `credit` computes, with advantages multiplied by the confidence factors."""
        return self.gain(groups, credit(groups, signals))

    def gain(self, groups: Sequence[Group], credit: Mapping[TurnKey, Credit]) -> Mapping[TurnKey, Credit]:
        """Return the credit with each advantage multiplied by the confidence factors of its turn.

        The targets of critics are unchanged.
        """
        factors: list[Mapping[TurnKey, float]] = []
        if self.confidence:
            factors.append(_against_own(groups, self.confidence))
        if self.relative:
            factors.append(_against_others(groups, self.relative))
        for factor in factors:
            credit = {
                key: replace(given, advantage_T=given.advantage_T * factor.get(key, 1.0))
                for key, given in credit.items()
            }
        return credit

    def needs_a_group(self, settings: S, group_size: int) -> S:
        """Return `settings` unchanged.

        Raises ValueError if `confidence` is on and `group_size` is 1, because there is then nothing to compare.
        """
        if self.confidence and group_size < 2:
            raise ValueError(
                "`umad.confidence` compares the episodes of a task, but `group_size: 1` has one per task; raise `group_size`, "
                "or set `umad.relative`"
            )
        return settings

    def check(self, team: Team) -> None:
        """Raise ConfigError if `relative` or `influence` is on and the team has one agent."""
        for key, value in (("relative", self.relative), ("influence", self.influence)):
            if value and len(team.names) < 2:
                raise ConfigError(
                    f"`algorithm.umad.{key}` needs other agents, but the team has only '{team.names[0]}'. Remove it, or add "
                    "agents to `team.agents`."
                )


def influence(place: tuple[int, int], episode: Episode, signals: Signals, eta: float) -> dict[int, float]:
    """Return, by turn index, η times the sign of the other agents' mean change of reward from the turn's round to the next.

    Only agents with a turn in both rounds count as other agents. If there are none, the influence is 0.
    """
    reward = unmodified_rewards(place, episode, signals)
    rounds = episode.rounds()
    rewards: dict[int, float] = {}
    for now, following in itertools.pairwise(rounds):
        both = [agent for agent in now if agent in following]
        change_TA = torch.tensor(
            [[reward[movers[agent].index] for agent in both] for movers in (now, following)],
            dtype=torch.float64,
        )
        # If this is the agent's last turn, all agents in `both` are others; the added column stands for the agent.
        outside_TA = torch.cat([change_TA, torch.zeros(2, 1, dtype=torch.float64)], dim=1)
        if len(both) >= 2:
            inside = umad_influence(change_TA, eta=eta)[0].tolist()
            rewards |= {now[agent].index: value for agent, value in zip(both, inside, strict=True)}
        if both:
            outside = float(umad_influence(outside_TA, eta=eta)[0, -1])
            rewards |= {turn.index: outside for agent, turn in now.items() if agent not in both}
    return rewards


def unmodified_rewards(place: tuple[int, int], episode: Episode, signals: Signals) -> dict[int, float]:
    """Return a mapping from the index of each turn to the reward of its agent before any shaping."""
    last = {turn.agent: turn.index for turn in episode.turns}
    reward: dict[int, float] = {}
    for turn in episode.turns:
        score = signals.score.get(TurnKey(*place, turn.index)) if turn.score is None else turn.score
        if score is None:
            terminal = episode.rewards.get(turn.agent, 0.0) if last[turn.agent] == turn.index else 0.0
            score = turn.reward + terminal
        reward[turn.index] = score
    return reward


def nll(turn: Turn) -> float:
    """Return the mean negative log-likelihood of a turn at sampling, in nats per token."""
    return -sum(turn.logprobs) / len(turn.logprobs)


def _against_own(groups: Sequence[Group], alpha: float) -> dict[TurnKey, float]:
    """Return the factor exp(−α·z) of every trained turn, with z standardised within the task, agent and round."""
    keys: list[TurnKey] = []
    values: list[float] = []
    sets: list[int] = []
    number: dict[tuple[int, str, int], int] = {}
    for key, turn, k in in_rounds(groups):
        keys.append(key)
        values.append(nll(turn))
        sets.append(number.setdefault((key.group, turn.agent, k), len(number)))
    if not keys:
        return {}
    nll_B = torch.tensor(values, dtype=torch.float64)
    gain_B = confidence_gain(torch.ones_like(nll_B), nll_B, torch.tensor(sets), len(number), alpha=alpha)
    return dict(zip(keys, gain_B.tolist(), strict=True))


def _against_others(groups: Sequence[Group], alpha: float) -> dict[TurnKey, float]:
    """Return the factor exp(−α·(NLL − mean NLL of the other agents in the round)) of every trained turn whose round has other agents."""
    rounds: dict[tuple[int, int, int], list[tuple[TurnKey, float]]] = {}
    for key, turn, k in in_rounds(groups):
        rounds.setdefault((key.group, key.episode, k), []).append((key, nll(turn)))
    factor: dict[TurnKey, float] = {}
    for members in rounds.values():
        if len(members) > 1:
            nll_A: Tensor = torch.tensor([value for _, value in members], dtype=torch.float64)
            gain_A = relative_confidence_gain(torch.ones_like(nll_A), nll_A, alpha=alpha)
            factor |= {key: gain for (key, _), gain in zip(members, gain_A.tolist(), strict=True)}
    return factor
