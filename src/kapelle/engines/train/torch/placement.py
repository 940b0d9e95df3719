"""Tensors that may be shared out over processes (`DTensor`): read whole, and written from whole ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(value: Any) -> Any:
    """Return a value itself, or gather a tensor from all processes, which must all ask for it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def own_part(value: Tensor) -> Tensor:
    """Return a tensor itself, or the part of it that this process holds."""
    return value.to_local() if isinstance(value, DTensor) else value


def laid_like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """Return a whole tensor, which all processes hold, laid out as another of its shape is; one that already is, itself."""
    if not isinstance(pattern, DTensor) or isinstance(tensor, DTensor):
        return tensor
    on_device = tensor.to(device=pattern.device, dtype=pattern.dtype)
    return distribute_tensor(on_device, pattern.device_mesh, pattern.placements, src_data_rank=None)
