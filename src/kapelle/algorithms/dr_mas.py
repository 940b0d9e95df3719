"""Dr.MAS: GRPO with a separate mean and standard deviation for each agent, over all its turns in the group.

    A = (R − mean) / (std + ε)

Agents of one team can differ in their returns and in how often they act. One mean and standard deviation over all agents
would scale one agent's gradient by another agent's spread. Here a set holds one agent's turns in the task's episodes, each
with the agent's return, so an episode with k turns of the agent counts k times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import SCALED, Earlier, by_turns_of_agent, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.rows import Signals, TurnKey
from kapelle.types import Group


class DrMAS(MonteCarlo):
    """Settings of Dr.MAS."""

    name: Literal["dr_mas"] = "dr_mas"

    def build(self) -> Algorithm:
        """Return the algorithm."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return A = (R − mean) / (std + ε) over the agent's turns in the task's episodes."""
        members = by_turns_of_agent(groups, self.rewards(groups, signals))
        return spread(self, groups, compare(members, SCALED, earlier))
