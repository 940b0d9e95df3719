"""MAPPO whose critics see what their agents see: IPPO under another name, for an identity."""

from __future__ import annotations

from typing import Literal

from kapelle.algorithm import Algorithm
from kapelle.algorithms.mappo import MAPPO
from kapelle.algorithms.ppo import ActorCritic, actor_critic_row


class LocalMAPPO(ActorCritic):
    """MAPPO's settings over a local view."""

    name: Literal["tests.learning.local_view:LocalMAPPO"] = "tests.learning.local_view:LocalMAPPO"

    def build(self) -> Algorithm:
        """Return MAPPO's row with the other view."""
        return actor_critic_row(MAPPO(**self.model_dump(exclude={"name"})), "mappo", "local")
