"""HAPPO: agents are updated one after another, each given the changes of the agents before it (2109.11251).

Each step draws a new random order i_1 … i_n:

    M¹ = Â,    M^{m+1} = M^m · ρ_new of i_m's turn in the same round
    agent i_m maximises E[min(ρM^m, clip(ρ)M^m)]

The advantages are MAPPO's, from one central critic. The ratio ρ of an agent treats its turn as one action, even if the loss
clips per token. The sum of its log-ratios is clamped to ±20. The old policy is the one in the loss's ratio: the policy that
sampled, or with `loss.importance_cap` the trainer's policy before the update.

Each agent needs its own policy. With shared weights, an agent's update would change the other agents too, and the monotonic
improvement that the order guarantees would be lost.

Deviations from the paper:

- The update follows the paper, but the critic is trained together with the first agent of the order.
"""

from __future__ import annotations

from typing import Literal

from kapelle.algorithm import Algorithm
from kapelle.algorithms.ppo import ActorCritic, actor_critic_row
from kapelle.algorithms.shared.orders import OrderConfig, Sequential


class HAPPO(ActorCritic):
    """Settings of HAPPO."""

    name: Literal["happo"] = "happo"
    order: OrderConfig = Sequential(name="sequential")

    def build(self) -> Algorithm:
        """Return the algorithm."""
        return actor_critic_row(self, self.name, "central")
