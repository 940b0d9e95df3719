"""What a recipe says of the built-in train engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kapelle.engines.train.protocol import TrainEngine, TrainSetup
from kapelle.settings.base import Settings

if TYPE_CHECKING:
    from kapelle.engines.train.torch.engine import TorchTrainEngine


class Torch(Settings):
    """Settings of the train engine in this process; where a launcher has started several, it is `ddp`."""

    name: Literal["torch"] = "torch"

    def build(self, setup: TrainSetup) -> TorchTrainEngine:
        """Return the engine, which trains in the models' own memory."""
        from kapelle.engines.train.torch.engine import TorchTrainEngine

        return TorchTrainEngine(setup)


class Ddp(Torch):
    """Settings of the same engine in several processes, each with all weights and a share of every step's samples."""

    name: Literal["ddp"] = "ddp"  # type: ignore[assignment]  # the tag of another class
    timeout: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    """Seconds for which a process waits for the others, at the start and at every collective operation."""


class Fsdp(Settings):
    """Settings of the engine that shards bases by FSDP2; adapters and heads are whole in every process."""

    name: Literal["fsdp"] = "fsdp"
    timeout: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    """Seconds for which a process waits for the others, at the start and at every collective operation."""
    cpu_offload: bool = False
    """Whether the parts of bases, of their gradients and of their moments lie in the machine's memory, and the optimiser steps there."""
    reshard_after_forward: bool = True
    """Whether a block's gathered weights are given back after its forward pass, and gathered once more for the backward pass."""

    def build(self, setup: TrainSetup) -> TrainEngine:
        """Return the engine, for a process alone `torch`; ConfigError for models that cannot be sharded."""
        if setup.ranks.size == 1:
            return Torch().build(setup)
        from kapelle.engines.train.fsdp import FsdpTrainEngine

        return FsdpTrainEngine(setup, self)
