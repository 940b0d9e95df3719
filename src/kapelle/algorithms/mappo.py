"""MAPPO: clipped actors with one central critic (2103.01955).

The critic, and only the critic, reads everything that all agents read and wrote before a turn, private views included. All else is PPO's row. The view (`signals.samples.central_prompt`) leaves out the answers of other agents
at the same moment, so that the baseline does not depend on simultaneous actions.

Deviations from the paper: value normalisation by running statistics (rewards here are bounded and declared) and death
masking (an agent that stopped has no tokens to train on) are left out.
"""

from __future__ import annotations

from typing import Literal

from kapelle.algorithm import Algorithm
from kapelle.algorithms.ppo import ActorCritic, actor_critic_row


class MAPPO(ActorCritic):
    """Settings of MAPPO."""

    name: Literal["mappo"] = "mappo"

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return actor_critic_row(self, self.name, "central")
