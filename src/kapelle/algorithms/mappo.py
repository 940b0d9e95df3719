"""MAPPO: clipped actors with one central critic (arXiv:2103.01955).

The critic reads everything that all agents read and wrote before a turn, including private views; the agents do not. In all
other respects, MAPPO is the same as PPO. The critic's view (`signals.samples.central_prompt`) excludes simultaneous
completions of other agents, so the baseline is independent of simultaneous actions.

Deviations from the paper:

- Value normalisation by running statistics is omitted, because rewards have declared bounds.
- Death masking is omitted, because an agent that has stopped has no tokens to train on.
"""

from __future__ import annotations

from typing import Literal

from kapelle.algorithm import Algorithm
from kapelle.algorithms.ppo import ActorCritic, actor_critic_row


class MAPPO(ActorCritic):
    """Settings of MAPPO (multi-agent PPO with one central critic)."""

    name: Literal["mappo"] = "mappo"

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return actor_critic_row(self, self.name, "central")
