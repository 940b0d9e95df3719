"""MAGRPO: one joint comparison for the whole team (2508.04652).

The G episodes of a task are G joint attempts. In every round the set holds the team's return from that round on, and
all agents that spoke in it get the same advantage: (R − mean_g) / (std_g + ε).

Prompts of later rounds differ inside a set (`groups.py` says what that means). Deviations from the paper: the ratio is
clipped; the paper's trainer takes one on-policy step, for which nothing is clipped.
"""

from __future__ import annotations

from typing import Literal

from kapelle.algorithm import Algorithm, Estimates
from kapelle.algorithms.groups import TurnRewards, by_round
from kapelle.algorithms.monte_carlo import MonteCarlo, SetCredit
from kapelle.algorithms.rewards import chain_path
from kapelle.functional.advantages import group_centred, group_scaled


class MAGRPO(MonteCarlo):
    """Settings of multi-agent GRPO."""

    name: Literal["magrpo"] = "magrpo"
    scale: Literal["std", "none"] = "std"

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        estimate = {"std": group_scaled, "none": group_centred}[self.scale]
        return self.row(self.name, SetCredit(self, by_round, estimate, self.paid_once))

    def paid_once(self, estimates: Estimates) -> TurnRewards:
        """Return what says how the team is paid, once, where it falls in time."""
        source = self.umad.paid(chain_path(self.team_reward, self.forms))
        return lambda place, episode: source(place, episode, estimates)
