"""How processes share out the weights of a base."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kapelle.settings.base import Settings


class Sharding(Settings):
    """Which parts lie where, and in which types they are computed with and summed."""

    cpu_offload: bool = False
    """Whether the parts of bases, of their gradients and of their moments lie in the machine's memory, and the optimiser steps there."""
    reshard_after_forward: bool = True
    """Whether a block's gathered weights are given back after its forward pass, and gathered once more for the backward pass."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Processes in a row that hold each block's products together, by torch's `parallelize_module`; the rest share parts out."""
    param_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type in which weights are gathered, computed with and exported; parts, moments and checkpoints stay in float32."""
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type in which gradients of shared-out weights are summed over the processes."""
