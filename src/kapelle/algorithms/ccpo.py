"""CCPO: what the team earns without an agent (2603.21563).

D_i = R(τ) − (1/K) Σ_k R(τ without i),  A_i = D_i − mean of the group's other attempts' D_i

for all turns of agent i. Without i, the agent says nothing from its first turn on: its message is empty, or the workflow goes on without it where it can (`debate`,
`vote`). What was said before is replayed, and what others say at the same moment; all after it is live. Nothing that is subtracted depends on what i says in this attempt, so that the expected
update is ∇J. Where the team can do without i, the luck of the task and of the partners is in both terms of D_i and cancels; where it cannot, R(τ without i) is a constant, and A_i is that of `rloo`.

R is what the team earns, counted once (`team_reward` says how), for every agent the same.

Deviations from the paper: the difference is compared with that of the other attempts, and not divided by a running spread, which would change the direction of the update.
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
        """Return what the agent adds to what the team earns, less the mean of what it adds in the group's other attempts."""

        def added(episode: Episode, agent: str) -> tuple[float, str]:
            earned = self.earned(episode)[agent]
            without = [
                paid[agent]
                for each in episode.interventions
                if each.agents == (agent,)
                for paid in each.returns
            ]
            return (earned - fmean(without), "added") if without else (earned, "earned")

        members = [member for _, member in by_agent_of(groups, added)]
        advantage: dict[TurnKey, float] = {}
        for member, better in zip(members, against_others(members, earlier), strict=True):
            advantage |= dict.fromkeys(member.keys, better)
        return spread(self, groups, advantage)
