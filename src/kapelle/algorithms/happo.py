"""HAPPO: agents improve one after another, each given the changes of those before it (2109.11251).

In a fresh random order i_1 … i_n: M¹ = Â, and after agent i_m's update M^{m+1} = M^m · ρ_new of its turn in the
same round; i_m maximises E[min(ρM^m, clip(ρ)M^m)]. The advantages are MAPPO's, by one central critic. ρ of an agent
is the ratio of its turn as one action, also where the loss clips token by token, with the log-sum clamped to ±20, against
the same old policy as the loss's own ratio: the one that sampled, or with `loss.importance_cap` the trainer's own before
the update.

Every agent needs weights of its own: with shared weights an agent's update would change the others too, and the
monotonic improvement that the order guarantees would be lost.

Deviations from the paper: none in the update; the critic learns together with the first agent in the order.
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
        """Return the algorithm's row."""
        return actor_critic_row(self, self.name, "central")
