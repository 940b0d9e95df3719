"""An extension of vLLM's workers that loads the weights of a whole model while they run.

vLLM makes its worker class inherit from `TakesWeights` (`worker_extension_cls`), in this process or in separate ones, and
`collective_rpc` calls the method. vLLM loads weights in place by `reload_weights`: each layer is filled as from a
checkpoint and copied in place, so that recorded graphs stay valid. On a CPU a layer computes with a packed copy of its
weights. A head that is tied to the embedding is packed only once, so 0.32.0 computes incorrect log-probs afterwards (0.9
nats). This module repacks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kapelle.runtime.tensors import load_tensors

WEIGHTS_FILE = "model.safetensors"
"""The weights file in a published model's folder."""


class TakesWeights:
    """A base class of vLLM's worker class."""

    model_runner: Any
    """The worker's own model runner."""

    def take_weights(self, folder: str | None, weights: Mapping[str, Tensor] | None = None) -> None:
        """Use these weights of the base from now on, or those in a folder, which each worker reads."""
        if weights is None:
            assert folder is not None, "weights are given as tensors or in a folder"
            weights = load_tensors(Path(folder) / WEIGHTS_FILE)
        self.model_runner.reload_weights(
            weights_iterator=((name, tensor.detach()) for name, tensor in weights.items())
        )
        repack(self.model_runner.model)


def repack(model: Any) -> None:
    """Repack the weights of layers that also keep them unpacked, as heads and embeddings do on a CPU."""
    for layer in model.modules():
        weight = layer._parameters.get("weight")  # noqa: SLF001 - an attribute of a layer with an adapter may be its base's
        if weight is not None and weight.numel() and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)
