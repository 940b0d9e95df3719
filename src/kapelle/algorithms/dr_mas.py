"""Dr.MAS: every agent normalised by its own mean and std, over all its turns in the group.

Agents of one team can differ much in what they earn and how often they act; a mean and std over all of them would scale one agent's
gradient by another's spread. Here the set is the agent's own turns in the task's episodes, each with the agent's
return, so that an episode with many turns of the agent counts as many times.
"""

from __future__ import annotations

from typing import Literal

from kapelle.algorithm import Algorithm
from kapelle.algorithms.shared.groups import SCALED, by_turns_of_agent
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, over_sets


class DrMAS(MonteCarlo):
    """Settings of Dr.MAS."""

    name: Literal["dr_mas"] = "dr_mas"

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.row(self.name, judge=over_sets(self, by_turns_of_agent, SCALED))
