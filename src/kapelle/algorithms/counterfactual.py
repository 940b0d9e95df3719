"""Counterfactual credit: the return of a turn is compared with returns after other completions of the same prompt.

    A_i = R(τ) − (1/K) Σ_k R(τ with turn i and all later turns sampled again)

A_i is COMA's advantage (arXiv:1705.08926, eq. 4) with sampled continuations in place of a learned Q. A_i is also the
difference reward of Wolpert and Tumer (2002), with other actions of the policy as the default action. Earlier turns and
simultaneous turns of partners are replayed, so both terms of A_i contain the same randomness of these turns. The baseline is
independent of turn i, so the expected update is ∇J.

With `alternatives: siblings`, the other actions are completions of the same prompt in other episodes of the group (the first
`continuations` of them), and only later turns are sampled. If no other episode has the same prompt, the turn itself is
sampled again.

With a `budget`, only some turns are continued: those with prompts after which the returns of the other episodes vary most.
With `priority: entropy`, they are those at which the policy has the highest entropy in the other episodes (arXiv:2607.14171,
arXiv:2605.05262). A turn without continuations is compared with the mean return of the other episodes of the group.

Deviations from COMA:

- No critic is learned, so the environment must be repeatable. The algorithm `coma` learns a critic.
- The papers on entropy also train the continuations. Here they only form the baseline.
- A sampled return replaces Q(s, a), so the advantage contains the noise of the return.
- The loss is the clipped surrogate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Literal

from pydantic import model_validator

from kapelle.algorithm import Algorithm, Change, Credit
from kapelle.algorithms.shared.groups import Earlier
from kapelle.algorithms.shared.monte_carlo import spread
from kapelle.algorithms.shared.replays import Replays, against_others, by_agent_of, disagreement, entropy
from kapelle.rows import Signals, TurnKey
from kapelle.team import Team
from kapelle.types import Group, Turn


class Counterfactual(Replays):
    """Settings of counterfactual credit, which compares a turn with sampled continuations."""

    name: Literal["counterfactual"] = "counterfactual"
    alternatives: Literal["resampled", "siblings"] = "resampled"
    """How alternatives to a turn are obtained: `resampled` samples the turn again, and `siblings` takes completions of the
    same prompt from other episodes of the group."""

    priority: Literal["disagreement", "entropy"] = "disagreement"
    """The turns that are continued first if there is a budget: those after which the returns of the other episodes vary most, or
    those at which the entropy of the policy per token is highest in the other episodes."""

    @model_validator(mode="after")
    def _has_budget(self) -> Counterfactual:
        if self.priority == "entropy" and self.budget is None and self.budget_tokens is None:
            raise ValueError(
                "`priority: entropy` chooses the turns to continue, but without a budget all turns are continued; set `budget`"
            )
        return self

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        says = entropy if self.priority == "entropy" else partial(disagreement, returns=self.returns)
        return self.replaying(self.name, self.credit, self.changes, says=says)

    def changes(self, group: Group, number: int, team: Team) -> Sequence[Change]:
        """Return the changes of every trained turn of an episode: one replacement per sibling, or one new sample of the turn."""
        found: list[Change] = []
        for turn in group.episodes[number].turns:
            if turn.trained:
                siblings = self._siblings(group, number, turn) if self.alternatives == "siblings" else []
                found += siblings or [Change("resample", (turn.agent,), turn.index)]
        return found

    def _siblings(self, group: Group, number: int, turn: Turn) -> list[Change]:
        """Return changes that replace a turn with completions of the same prompt from other episodes of the group."""
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
        """Return, for each turn, its return minus the mean return after its alternatives."""
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
