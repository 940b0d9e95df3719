"""Settings of the sharding of a base's weights over processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kapelle.settings.base import Settings


class Sharding(Settings):
    """The placement of shards, and the types in which they are computed and summed."""

    cpu_offload: bool = False
    """Whether shards of bases, gradients and moments are in the host's memory, where the optimiser also runs."""
    reshard_after_forward: bool = True
    """Whether a block's gathered weights are freed after its forward pass and gathered again for the backward pass."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of consecutive processes that split each block's products with torch's `parallelize_module`; sharding is
    across such sets."""
    param_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type in which weights are gathered, computed and exported; shards, moments and checkpoints stay in float32."""
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type in which gradients of sharded weights are summed over the processes."""
