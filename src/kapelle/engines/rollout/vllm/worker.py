"""What vLLM's workers can do beside what they do anyway: take the weights of a whole model while they run.

vLLM makes its worker class inherit from `TakesWeights` (`worker_extension_cls`), in this process or in its own ones, and
`collective_rpc` calls the method. vLLM loads weights in place by `reload_weights`: each layer is filled as from a checkpoint
and copied to where it was, so that recorded graphs go on with it. On a CPU a layer computes with a packed copy of its weights. A
head that is tied to the embedding is packed once and not again, so that 0.32.0 has a wrong model after it (0.9 nats). Here it is packed
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kapelle.runtime.tensors import load_tensors

WEIGHTS_FILE = "model.safetensors"
"""The file of a published model's weights in its folder."""


class TakesWeights:
    """A part of vLLM's worker class."""

    model_runner: Any
    """The worker's own."""

    def take_weights(self, folder: str | None, weights: Mapping[str, Tensor] | None = None) -> None:
        """Compute with these weights of the base from now on, or with those of a folder, which each worker reads."""
        if weights is None:
            assert folder is not None, "weights come as tensors or in a folder"
            weights = load_tensors(Path(folder) / WEIGHTS_FILE)
        self.model_runner.reload_weights(
            weights_iterator=((name, tensor.detach()) for name, tensor in weights.items())
        )
        pack_again(self.model_runner.model)


def pack_again(model: Any) -> None:
    """Pack the weights of layers that keep them beside their packed copy, as heads and embeddings do on a CPU."""
    for layer in model.modules():
        weight = layer._parameters.get("weight")  # noqa: SLF001 - a layer with an adapter shows its base's as its own
        if weight is not None and weight.numel() and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)
