"""MAPPO: clipped actors with one central critic (2103.01955).

Only the critic reads everything that all agents read and wrote before a turn, private views included. Everything else is as
in PPO. The critic's view (`signals.samples.central_prompt`) excludes simultaneous completions of other agents, so the
baseline is independent of simultaneous actions.

Deviations from the paper:

- Value normalisation by running statistics is omitted, because rewards have declared bounds.
- Death masking is omitted, because an agent that has stopped has no tokens to train on.
"""

from __future__ import annotations

from typing import Literal

from kapelle.algorithm import Algorithm
from kapelle.algorithms.ppo import ActorCritic, actor_critic_row


class MAPPO(ActorCritic):
    """Settings of MAPPO."""

    name: Literal["mappo"] = "mappo"

    def build(self) -> Algorithm:
        """Return the algorithm."""
        return actor_critic_row(self, self.name, "central")
