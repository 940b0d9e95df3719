"""MAGRPO: one joint comparison for the whole team (2508.04652).

The G episodes of a task are G joint attempts. In every round the set holds the team's return from that round on, and
all agents that spoke in it get the same advantage: (R − mean_g) / (std_g + ε).

Prompts of later rounds differ inside a set (`groups.py` says what that means). Deviations from the paper: the ratio is
clipped; the paper's trainer takes one on-policy step, for which nothing is clipped.
"""

from __future__ import annotations

from typing import Literal

from kapelle.algorithm import Algorithm
from kapelle.algorithms.groups import by_round
from kapelle.algorithms.monte_carlo import MonteCarlo, SetCredit
from kapelle.algorithms.surrogate import SurrogateConfig
from kapelle.functional.advantages import group_centred, group_scaled


class MAGRPO(MonteCarlo):
    """Settings of multi-agent GRPO."""

    name: Literal["magrpo"] = "magrpo"
    scale: Literal["std", "none"] = "none"
    """`std` divides by the group's spread, as GRPO does; the paper's estimator does not."""
    loss: SurrogateConfig = SurrogateConfig(aggregation="sequence_sum", constant=1)
    """Log-probs are summed over a turn, and averaged over turns."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        estimate = {"std": group_scaled, "none": group_centred}[self.scale]
        return self.row(self.name, SetCredit(self, by_round, estimate, self.paid_once))
