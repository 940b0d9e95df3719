"""Counterfactual credit: what the same moment is worth when one agent says something else there.

A_i = R(τ) − (1/K) Σ_k R(τ with turn i sampled anew, and all after it). It is the advantage of COMA (1705.08926, equation 4) with
continuations in place of a learned Q, and the difference reward of Wolpert and Tumer (2002) with the policy's own other actions as the
default action. What the partners have said before is replayed, and so is what they say at the same moment: their luck is in both terms.
The baseline does not depend on the turn, so that the expected update is ∇J.

`alternatives: siblings` takes what other episodes of the group said to the same prompt as the other actions, the first `continuations`
of them; only what follows is sampled. Where no other episode read that prompt the turn is sampled anew.

Within a `budget` those turns are played on after whose prompts the other attempts' returns disagree most; a turn that is not is compared
with the mean of the group's other attempts.

Deviations from COMA: no critic, so that worlds have to repeat (`coma` learns one); a return takes the place of Q(s, a), so that A has
its noise; the clipped surrogate.
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
from kapelle.algorithms.shared.rewards import agent_returns
from kapelle.rows import Signals, TurnKey
from kapelle.team import Team
from kapelle.types import Episode, Group, Turn


class Counterfactual(Replays):
    """Settings of counterfactual credit by continuations."""

    name: Literal["counterfactual"] = "counterfactual"
    alternatives: Literal["resampled", "siblings"] = "resampled"
    """Where an agent's other actions come from: sampled anew, or said by other episodes of the group to the same prompt."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.replaying(
            self.name, self.credit, self.changes, says=partial(disagreement, returns=self.returns)
        )

    def returns(self, episode: Episode) -> Mapping[str, float]:
        """Return what each agent is trained on."""
        return agent_returns(episode, self.team_reward, self.forms)

    def changes(self, group: Group, number: int, team: Team) -> Sequence[Change]:
        """Return a change of every trained turn; several, where others stand in its place."""
        episode = group.episodes[number]
        found: list[Change] = []
        for turn in episode.turns:
            if turn.trained:
                anew = Change("resample", (turn.agent,), turn.index)
                found += self._siblings(group, number, turn) or [anew]
        return found

    def _siblings(self, group: Group, number: int, turn: Turn) -> list[Change]:
        """Return what other episodes of the group said to the prompt of a turn, in its place; nothing where turns are sampled anew."""
        place = sum(one.agent == turn.agent for one in group.episodes[number].turns[: turn.index])
        said = [
            one.by(turn.agent)[place]
            for k, one in enumerate(group.episodes)
            if k != number and one.error is None and place < len(one.by(turn.agent))
        ]
        if self.alternatives == "resampled":
            return []
        same = [other for other in said if other.prompt_ids == turn.prompt_ids]
        return [Change("replace", (turn.agent,), turn.index, other) for other in same[: self.continuations]]

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return each turn's return less what the moment is worth with another turn."""
        members = by_agent_of(groups, lambda episode, agent: (self.returns(episode)[agent], ""))
        plain = against_others([member for _, member in members], earlier)
        advantage: dict[TurnKey, float] = {}
        for (episode, member), better in zip(members, plain, strict=True):
            agent = str(member.place[1])
            for key in member.keys:
                others = [
                    paid[agent]
                    for each in episode.interventions
                    if each.turn == key.turn and each.agents == (agent,)
                    for paid in each.returns
                    if agent in paid
                ]
                advantage[key] = member.value - fmean(others) if others else better
        return spread(self, groups, advantage)
