"""What a recipe says of the train engines that work in the models' own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kapelle.engines.train.protocol import TrainSetup
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
    """Seconds for which a process waits for the others: at the start, and wherever they meet."""
