"""MAGRPO: one joint comparison for the whole team (2508.04652).

The G episodes of a task are G joint attempts. In every round the set holds the team's return from that round on, and
all agents that spoke in it get the same advantage: (R − mean_g) / (std_g + ε).

Prompts of later rounds differ inside a set (`groups.py` says what that means). Deviations from the paper: the ratio is
clipped; the paper's trainer takes one on-policy step, for which nothing is clipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from kapelle.algorithm import Algorithm
from kapelle.algorithms.groups import by_round
from kapelle.algorithms.monte_carlo import MonteCarlo, SetCredit
from kapelle.algorithms.rewards import chain_rewards
from kapelle.functional.advantages import group_centred, group_scaled
from kapelle.types import Episode


class MAGRPO(MonteCarlo):
    """Settings of multi-agent GRPO."""

    name: Literal["magrpo"] = "magrpo"
    scale: Literal["std", "none"] = "std"

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        estimate = {"std": group_scaled, "none": group_centred}[self.scale]
        return self.row(self.name, SetCredit(self, by_round, estimate, self.paid_once))

    def paid_once(self, episode: Episode) -> Mapping[int, float]:
        """Return what the team is paid, once, where it falls in time."""
        return chain_rewards(episode, self.team_reward, self.forms)
