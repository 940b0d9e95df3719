"""An extension of vLLM's worker class that loads the weights of a whole model while the worker is running.

vLLM makes its worker class inherit from `TakesWeights` (setting `worker_extension_cls`), whether the workers run in
this process or in separate processes, and `collective_rpc` calls the method `take_weights`. vLLM's `reload_weights`
loads the weights in place: each layer is loaded as from a checkpoint and then copied in place, so that recorded graphs
remain valid. On a CPU, a layer computes with a packed copy of its weights. vLLM 0.32.0 packs an output head that is
tied to the embedding only once and therefore computes incorrect log-probs after a reload (an error of 0.9 nats). This
module repacks such heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kapelle.runtime.tensors import load_tensors

WEIGHTS_FILE = "model.safetensors"
"""The name of the weights file in the folder of a published model."""


class TakesWeights:
    """A base class that is added to vLLM's worker class."""

    model_runner: Any
    """The model runner of the vLLM worker."""

    def take_weights(self, folder: str | None, weights: Mapping[str, Tensor] | None = None) -> None:
        """Replace the weights of the base model by the given weights or by the weights in a folder, which each worker reads."""
        if weights is None:
            assert folder is not None, "weights are given as tensors or in a folder"
            weights = load_tensors(Path(folder) / WEIGHTS_FILE)
        self.model_runner.reload_weights(
            weights_iterator=((name, tensor.detach()) for name, tensor in weights.items())
        )
        repack(self.model_runner.model)


def repack(model: Any) -> None:
    """Repack the weights of layers that keep both packed and unpacked weights, such as output heads and embeddings on a CPU."""
    for layer in model.modules():
        weight = layer._parameters.get("weight")  # noqa: SLF001 - an attribute of a layer with an adapter may be its base's
        if weight is not None and weight.numel() and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)
