"""HAPPO: agents are updated one after another, and each update accounts for the updates of the agents before it (arXiv:2109.11251).

Each training step draws a new random order of the agents, i_1 … i_n:

    M¹ = Â,    M^{m+1} = M^m · ρ_new of i_m's turn in the same round
    agent i_m maximises E[min(ρM^m, clip(ρ)M^m)]

The advantages are those of MAPPO, with one central critic. The factor ρ_new treats the turn of an agent as one action, even
if the loss clips per token. The sum of the log-ratios of a turn is clamped to ±20. The old policy in ρ_new is the same as in
the ratio of the loss: the policy that sampled, or with `loss.importance_cap` the trainer's policy before the update.

Each agent needs its own policy. With shared weights, the update of one agent would also change the other agents, and the
guarantee of monotonic improvement would be lost.

Deviations from the paper:

- The critic is trained together with the first agent of the order.
"""

from __future__ import annotations

from typing import Literal

from kapelle.algorithm import Algorithm
from kapelle.algorithms.ppo import ActorCritic, actor_critic_row
from kapelle.algorithms.shared.orders import OrderConfig, Sequential


class HAPPO(ActorCritic):
    """Settings of HAPPO (heterogeneous-agent PPO)."""

    name: Literal["happo"] = "happo"
    order: OrderConfig = Sequential(name="sequential")

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return actor_critic_row(self, self.name, "central")
