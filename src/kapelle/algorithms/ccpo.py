"""CCPO: credit by removal. The team's return is compared with its return without the agent (arXiv:2603.21563).

    D_i = R(τ) − (1/K) Σ_k R(τ without i),    A_i = D_i − mean D_i of the group's other episodes

All turns of agent i have the advantage A_i. To remove agent i, its messages are left empty from its first turn on. Workflows
that can continue without an agent (`debate`, `vote`) leave the agent out instead. Earlier turns and simultaneous turns of
other agents are replayed. All turns after the first turn of agent i are sampled again. The subtracted terms are independent
of i's completions in this episode, so the expected update is ∇J.

If the team can solve the task without agent i, both terms of D_i contain the same randomness of the task and of the other
agents, which cancels. If the team cannot solve the task without agent i, R(τ without i) is constant, and A_i is the same as
in `rloo`.

R is the team's return, as `team_reward` defines it. The team's return is counted once and is the same for every agent.

Deviations from the paper:

- Each D_i is compared with the D_i of the other episodes. The paper divides D_i by a running standard deviation, which would
  change the direction of the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

from kapelle.algorithm import Algorithm, Change, Credit
from kapelle.algorithms.shared.groups import Earlier
from kapelle.algorithms.shared.replays import Replays, by_agent_of, spread_members
from kapelle.rows import Signals, TurnKey
from kapelle.team import Team
from kapelle.types import Episode, Group


class CCPO(Replays):
    """Settings of CCPO: credit by removal of single agents."""

    name: Literal["ccpo"] = "ccpo"

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return self.replaying(self.name, self.credit, self.changes, self.earned)

    def changes(self, group: Group, number: int, team: Team) -> Sequence[Change]:
        """Return one change per trained agent, which removes the agent from the episode."""
        turns = group.episodes[number].turns
        return [
            Change("remove", (agent,))
            for agent in dict.fromkeys(turn.agent for turn in turns if turn.trained)
        ]

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return, for each agent, D_i minus the mean D_i of the other episodes of the group."""

        def difference(episode: Episode, agent: str) -> tuple[float, str]:
            earned = self.earned(episode)[agent]
            without = [
                returns[agent]
                for intervention in episode.interventions
                if intervention.agents == (agent,)
                for returns in intervention.returns
            ]
            return (earned - fmean(without), "added") if without else (earned, "earned")

        members = [member for _, member in by_agent_of(groups, difference)]
        return spread_members(self, groups, members, earlier)
