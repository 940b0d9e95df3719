"""Counterfactual credit: what the same moment is worth when one agent says something else there.

A_i = R(τ) − (1/K) Σ_k R(τ with turn i sampled anew, and all after it). It is the advantage of COMA (1705.08926, equation 4) with
continuations in place of a learned Q, and the difference reward of Wolpert and Tumer (2002) with the policy's own other actions as the
default action. What the partners have said before is replayed, and so is what they say at the same moment: their luck is in both terms.
The baseline does not depend on the turn, so that the expected update is ∇J.

`alternatives: siblings` takes what other episodes of the group said to the same prompt as the other actions, the first `continuations`
of them; only what follows is sampled. Where no other episode read that prompt the turn is sampled anew.

Changes are played in the order in which returns after their prompts disagree (`budget`); a turn that has none left is compared with
the mean of the group's other attempts.

Deviations from COMA: no critic, so that worlds have to repeat (`coma` learns one); a return takes the place of Q(s, a), so that A has
its noise; the clipped surrogate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

from kapelle.algorithm import Algorithm, Change, Credit
from kapelle.algorithms.shared.groups import Earlier
from kapelle.algorithms.shared.monte_carlo import spread
from kapelle.algorithms.shared.replays import Replays, against_others, by_agent_of, disagreement, slot_of
from kapelle.algorithms.shared.rewards import agent_returns
from kapelle.rows import Signals, TurnKey
from kapelle.team import Team
from kapelle.types import Episode, Group


class Counterfactual(Replays):
    """Settings of counterfactual credit by continuations."""

    name: Literal["counterfactual"] = "counterfactual"
    alternatives: Literal["resampled", "siblings"] = "resampled"
    """Where an agent's other actions come from: sampled anew, or said by other episodes of the group to the same prompt."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.replaying(self.name, self.credit, self.changes)

    def returns(self, episode: Episode) -> Mapping[str, float]:
        """Return what each agent is trained on."""
        return agent_returns(episode, self.team_reward, self.forms)

    def changes(self, group: Group, number: int, team: Team) -> Sequence[Change]:
        """Return a change of every trained turn, those first after whose prompts the other episodes' returns differ most."""
        episode = group.episodes[number]
        differ = disagreement(group, number, self.returns)
        found: list[tuple[float, list[Change]]] = []
        for turn in episode.turns:
            if turn.trained:
                others = []
                if self.alternatives == "siblings":
                    slot = slot_of(episode, turn)
                    others = [
                        Change("replace", (turn.agent,), turn.index, by)
                        for k, one in enumerate(group.episodes)
                        for by in one.turns
                        if k != number
                        and one.error is None
                        and by.prompt_ids == turn.prompt_ids
                        and slot_of(one, by) == slot
                    ][: self.continuations]
                own = others or [Change("resample", (turn.agent,), turn.index)]
                found.append((differ(*slot_of(episode, turn)), own))
        found.sort(key=lambda pair: -pair[0])
        return [change for _, own in found for change in own]

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return each turn's return less what the moment is worth with another turn."""
        members = by_agent_of(groups, lambda episode, agent: self.returns(episode).get(agent))
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
