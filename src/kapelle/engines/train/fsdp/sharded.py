"""A base whose weights are shared out over the processes by FSDP2 (`fully_shard`), for the flat pass.

FSDP gathers a block's weights before the block and gives them back after it, forward and backward, by hooks around methods
that it is told of. The flat pass calls no module's `forward`, so that each block, and the whole pass, becomes such a method.

Shapes: N flat tokens, D hidden size.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from kapelle.errors import ConfigError
from kapelle.models.fast.flat import Attend
from kapelle.models.language_model import LanguageModel


class ShardedBase:
    """The weights of one model: whole in this process, or its part of them."""

    def __init__(self, model: LanguageModel, mesh: DeviceMesh, *, cpu_offload: bool) -> None:
        """Share the weights out over the mesh; they are parts from now on."""
        if model.flat is None:
            raise ConfigError(
                f"`train_engine: fsdp` shards models of the flat pass, and '{model.name}' is of another kind. Set "
                "`train_engine.name: ddp`."
            )
        self._model, self._flat = model, model.flat
        model.parted = True
        offload: OffloadPolicy = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
        for layer in self._flat.layers:
            fully_shard(layer, mesh=mesh, offload_policy=offload)
            layer.flat_block = MethodType(_block, layer)
            register_fsdp_forward_method(layer, "flat_block")
        root: Any = model.model
        fully_shard(root, mesh=mesh, offload_policy=offload)
        root.flat_pass = MethodType(self._pass, root)
        register_fsdp_forward_method(root, "flat_pass")
        self._parts = [module for module in root.modules() if isinstance(module, FSDPModule)]
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)  # sums: the engine divides by the global weight
            part.set_force_sum_reduction_for_comms(True)

    def share_out(self) -> None:
        """Keep this process's part of the weights alone, and compute with gathered ones."""
        for part in self._parts:
            part.reshard()
        self._model.through = self._model.model.flat_pass

    def gather(self) -> None:
        """Hold all weights, so that they can be read and sampled with."""
        self._model.through = None
        for part in self._parts:
            part.unshard()

    def _pass(self, _root: Any, tokens_N: Tensor, positions_N: Tensor, attend: Attend, run: Any) -> Tensor:
        layers = self._flat.layers

        def block(own: Any, number: int, x_ND: Tensor, *rest: Any) -> Tensor:
            if number == 0 and torch.is_grad_enabled() and not x_ND.requires_grad:
                # Every process's backward pass goes through every block, whichever adapters its rows have.
                x_ND = x_ND.detach().requires_grad_()
            after_ND: Tensor = layers[number].flat_block(own, run, number, x_ND, *rest)
            return after_ND

        return self._flat.hidden(tokens_N, positions_N, attend, block)


def _block(_layer: Any, own: Any, run: Any, *args: Any) -> Any:
    """Run a block, or let `run` keep its input alone and compute it again."""
    return own(*args) if run is None else run(own, *args)
