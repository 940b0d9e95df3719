"""Named tensors in memory that two processes share: one writes them, the other reads them, and nothing is sent.

The memory is an open file without a name, of the kernel's memory on Linux and of the disk elsewhere, so that it is gone
with the last process that holds it, however that ends. /dev/shm is not used: containers often give it 64 MiB.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

Layout = Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]]
"""Name of a policy → name of a tensor → (dtype, shape)."""

ALIGNED = 64
"""Bytes to whose multiples tensors are moved, as torch's own memory is."""


def layout_of(tensors: Mapping[str, Mapping[str, Tensor]]) -> Layout:
    """Return the layout of tensors by policy and name."""
    return {
        policy: {
            key: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for key, tensor in own.items()
        }
        for policy, own in tensors.items()
    }


class SharedTensors:
    """The tensors of a layout, on memory behind a file descriptor that a child process can inherit."""

    def __init__(self, layout: Layout, descriptor: int | None = None) -> None:
        """Take new memory, or that behind a descriptor, which is closed with this object."""
        places, size = _places(layout)
        self.descriptor = _memory(size) if descriptor is None else descriptor
        self._map = mmap.mmap(self.descriptor, size)
        self._tensors = {
            policy: {
                key: self._tensor(getattr(torch, dtype), shape, places[policy, key])
                for key, (dtype, shape) in own.items()
            }
            for policy, own in layout.items()
        }

    def _tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
        count = math.prod(shape)
        if not count:  # a buffer has no room of no bytes
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def __contains__(self, policy: str) -> bool:
        """Return whether there is room for a policy."""
        return policy in self._tensors

    def __getitem__(self, policy: str) -> Mapping[str, Tensor]:
        """Return a policy's tensors, by name; on the CPU."""
        return self._tensors[policy]

    def close(self) -> None:
        """Close the descriptor; the memory goes with the tensors."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _places(layout: Layout) -> tuple[dict[tuple[str, str], int], int]:
    """Return where every tensor begins, and how many bytes there are (at least one)."""
    places: dict[tuple[str, str], int] = {}
    end = 0
    for policy, own in layout.items():
        for key, (dtype, shape) in own.items():
            places[policy, key] = end
            size = math.prod(shape) * getattr(torch, dtype).itemsize
            end += math.ceil(size / ALIGNED) * ALIGNED
    return places, max(end, 1)


def _memory(size: int) -> int:
    """Return a descriptor of so many bytes of memory that has no name; OSError where there is no room."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("kapelle-weights")
    else:  # macOS
        descriptor, path = tempfile.mkstemp(prefix="kapelle-weights-")
        Path(path).unlink()
    os.ftruncate(descriptor, size)
    return descriptor
