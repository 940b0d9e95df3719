"""Settings for sharding the weights of base models over processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kapelle.settings.base import Settings


class Sharding(Settings):
    """The placement of shards, and the types in which weights are computed and gradients are summed."""

    cpu_offload: bool = False
    """Whether the shards of base weights, gradients and optimiser moments are in the host's memory. In this case, the
    optimiser also runs on the host."""
    reshard_after_forward: bool = True
    """Whether the gathered weights of a block are freed after the block's forward pass and gathered again for the
    backward pass."""
    tensor_parallel: int = Field(default=1, ge=1)
    """The number of consecutive processes that split the matrix products of each block (tensor parallelism with torch's
    `parallelize_module`). Weights are sharded across such groups of processes."""
    param_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type in which weights are gathered, computed and exported. Shards, optimiser moments and checkpoints stay in
    float32."""
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type in which gradients of sharded weights are summed over the processes."""
