"""What a recipe says of the train engine whose bases are sharded over the processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kapelle.engines.train.protocol import TrainEngine, TrainSetup
from kapelle.settings.base import Settings


class Fsdp(Settings):
    """Settings of the engine that shards bases by FSDP2; adapters and heads are whole in every process."""

    name: Literal["fsdp"] = "fsdp"
    timeout: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    """Seconds for which a process waits for the others: at the start, and wherever they meet."""
    cpu_offload: bool = False
    """Whether the parts of bases lie in the machine's memory while they are not computed with."""

    def build(self, setup: TrainSetup) -> TrainEngine:
        """Return the engine, for a process alone `torch`; ConfigError for models that cannot be sharded."""
        from kapelle.engines.train.fsdp.engine import FsdpTrainEngine
        from kapelle.engines.train.torch.settings import Torch

        if setup.ranks.size == 1:
            return Torch().build(setup)
        return FsdpTrainEngine(setup, cpu_offload=self.cpu_offload)
