"""Counterfactual credit: a turn's return compared with returns after other completions of the same prompt.

    A_i = R(τ) − (1/K) Σ_k R(τ with turn i and all later turns sampled again)

This is COMA's advantage (1705.08926, eq. 4) with continuations in place of a learned Q. It is also the difference reward of
Wolpert and Tumer (2002) with the policy's own other actions as the default action. Earlier turns and simultaneous turns of
partners are replayed, so their randomness is in both terms. The baseline is independent of the turn, so the expected update
is ∇J.

With `alternatives: siblings`, the other actions are completions of the same prompt in other episodes of the group (the
first `continuations` of them), and only later turns are sampled. If no other episode has that prompt, the turn is sampled
again.

Within a `budget`, the turns chosen for continuation are those with prompts after which the other episodes' returns vary
most. A turn without continuations is compared with the mean of the group's other episodes.

Deviations from COMA:

- There is no critic, so the environment must be repeatable (`coma` learns a critic).
- A sampled return replaces Q(s, a), so A contains the return's noise.
- The loss is the clipped surrogate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Literal

from kapelle.algorithm import Algorithm, Change, Credit
from kapelle.algorithms.shared.groups import Earlier
from kapelle.algorithms.shared.monte_carlo import spread
from kapelle.algorithms.shared.replays import Replays, against_others, by_agent_of, disagreement
from kapelle.rows import Signals, TurnKey
from kapelle.team import Team
from kapelle.types import Group, Turn


class Counterfactual(Replays):
    """Settings of counterfactual credit by continuations."""

    name: Literal["counterfactual"] = "counterfactual"
    alternatives: Literal["resampled", "siblings"] = "resampled"
    """Source of an agent's other actions: sampled again, or taken from other episodes with the same prompt."""

    def build(self) -> Algorithm:
        """Return the algorithm."""
        return self.replaying(
            self.name, self.credit, self.changes, says=partial(disagreement, returns=self.returns)
        )

    def changes(self, group: Group, number: int, team: Team) -> Sequence[Change]:
        """Return the changes of every trained turn: one per sibling, or one resampled turn."""
        found: list[Change] = []
        for turn in group.episodes[number].turns:
            if turn.trained:
                siblings = self._siblings(group, number, turn) if self.alternatives == "siblings" else []
                found += siblings or [Change("resample", (turn.agent,), turn.index)]
        return found

    def _siblings(self, group: Group, number: int, turn: Turn) -> list[Change]:
        """Return replacements of a turn by the group's other completions of its prompt."""
        place = sum(other.agent == turn.agent for other in group.episodes[number].turns[: turn.index])
        others = [
            episode.by(turn.agent)[place]
            for k, episode in enumerate(group.episodes)
            if k != number and episode.error is None and place < len(episode.by(turn.agent))
        ]
        same = [other for other in others if other.prompt_ids == turn.prompt_ids]
        return [Change("replace", (turn.agent,), turn.index, other) for other in same[: self.continuations]]

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return each turn's return minus the mean return after its alternatives."""
        members = by_agent_of(groups, lambda episode, agent: (self.returns(episode)[agent], ""))
        plain = against_others([member for _, member in members], earlier)
        advantage: dict[TurnKey, float] = {}
        for (episode, member), difference in zip(members, plain, strict=True):
            agent = str(member.place[1])
            for key in member.keys:
                others = [
                    returns[agent]
                    for intervention in episode.interventions
                    if intervention.turn == key.turn and intervention.agents == (agent,)
                    for returns in intervention.returns
                    if agent in returns
                ]
                advantage[key] = member.value - fmean(others) if others else difference
        return spread(self, groups, advantage)
