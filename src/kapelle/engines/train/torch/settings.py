"""What a recipe says of the train engine in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kapelle.engines.train.protocol import TrainSetup
from kapelle.settings.base import Settings

if TYPE_CHECKING:
    from kapelle.engines.train.torch.engine import TorchTrainEngine


class Torch(Settings):
    """Settings of the train engine in this process."""

    name: Literal["torch"] = "torch"

    def build(self, setup: TrainSetup) -> TorchTrainEngine:
        """Return the engine, which trains in the models' own memory."""
        from kapelle.engines.train.torch.engine import TorchTrainEngine

        return TorchTrainEngine(setup)
