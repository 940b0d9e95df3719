"""CCPO: what the team earns without an agent (2603.21563).

A_i = R(τ) − (1/K) Σ_k R(τ without i), for all turns of agent i. Without i, the agent says nothing from its first turn on: its message is empty, or the
workflow goes on without it where it can (`debate`, `vote`). What was said before is replayed, all after it is live. The baseline does not
depend on what i says, so that the expected update is ∇J. It is a good baseline where the team can do without i, and a poor one where it cannot: there R(τ without i) is
a constant, often 0, and A_i = R.

R is what the team earns, counted once (`team_reward` says how), for every agent the same.

Deviations from the paper: no normalisation of the difference by a running mean and spread, which would change the direction of the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

from kapelle.algorithm import Algorithm, Change, Credit
from kapelle.algorithms.shared.groups import Earlier
from kapelle.algorithms.shared.monte_carlo import spread
from kapelle.algorithms.shared.replays import Replays, against_others, by_agent_of, team_return
from kapelle.rows import Signals, TurnKey
from kapelle.team import Team
from kapelle.types import Episode, Group


class CCPO(Replays):
    """Settings of credit by removal."""

    name: Literal["ccpo"] = "ccpo"

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.replaying(self.name, self.credit, self.changes, self.earned)

    def earned(self, episode: Episode) -> Mapping[str, float]:
        """Return what the team earned, as every agent's return."""
        return dict.fromkeys(episode.agents, team_return(episode, self.team_reward, self.forms))

    def changes(self, group: Group, number: int, team: Team) -> Sequence[Change]:
        """Return the removal of every agent that is trained."""
        turns = group.episodes[number].turns
        return [
            Change("remove", (agent,))
            for agent in dict.fromkeys(turn.agent for turn in turns if turn.trained)
        ]

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return what the team earned less what it earns without the agent."""
        members = by_agent_of(groups, lambda episode, agent: self.earned(episode)[agent])
        plain = against_others([member for _, member in members], earlier)
        advantage: dict[TurnKey, float] = {}
        for (episode, member), better in zip(members, plain, strict=True):
            agent = str(member.place[1])
            without = [
                paid[agent]
                for each in episode.interventions
                if each.agents == (agent,)
                for paid in each.returns
            ]
            advantage |= dict.fromkeys(member.keys, member.value - fmean(without) if without else better)
        return spread(self, groups, advantage)
