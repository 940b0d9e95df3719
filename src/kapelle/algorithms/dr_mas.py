"""Dr.MAS: GRPO with a separate mean and standard deviation for each agent over all of the agent's turns in the group.

    A = (R − mean) / (std + ε)

Agents of one team can differ in their returns and in how often they act. With one mean and standard deviation over all
agents, the spread of one agent's returns would scale the gradients of the others. A comparison set of Dr.MAS holds all turns
of one agent in the task's episodes, each with the agent's return. An episode with k turns of the agent therefore counts k
times.
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
    """Settings of Dr.MAS, which is GRPO with a separate normalisation for each agent."""

    name: Literal["dr_mas"] = "dr_mas"

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the advantage A = (R − mean) / (std + ε), with mean and std over the agent's turns in the task's episodes."""
        members = by_turns_of_agent(groups, self.rewards(groups, signals))
        return spread(self, groups, compare(members, SCALED, earlier))
