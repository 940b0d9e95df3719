"""Store named tensors outside of this process: in a safetensors file, packed as bytes, or in shared memory."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kapelle.errors import DataError
from kapelle.runtime.machine import REASONS
from kapelle.runtime.on_demand import Tensor, torch


def leaves(tree: object, place: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of a tree in order.

    Each leaf is a pair of its dotted path of keys and indices, starting with `place`, and its value.
    """
    if not isinstance(tree, Mapping | list | tuple):
        yield place, tree
        return
    for key, each in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from leaves(each, f"{place}.{key}" if place else str(key))


def read_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor as a flat float64 tensor on the CPU, and synchronise only once with each device."""
    found: dict[int, Tensor] = {}
    for device in {each.device for each in tensors}:
        here = {id(each): each.detach().reshape(-1) for each in tensors if each.device == device}
        kinds = dict.fromkeys(each.dtype for each in here.values())
        # Convert all tensors of a type together.
        alike = {key: each for kind in kinds for key, each in here.items() if each.dtype == kind}
        pieces = [
            torch.cat([each for each in alike.values() if each.dtype == kind]).double() for kind in kinds
        ]
        flat = torch.cat(pieces).cpu()
        found |= zip(alike, flat.split([each.numel() for each in alike.values()]), strict=True)
    return [found[id(each)] for each in tensors]


def copy_together(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return bitwise copies of tensors on the CPU, each in separate memory, and synchronise only once with each device."""
    found: dict[str, Tensor] = {}
    for device in {each.device for each in tensors.values()}:
        here = {
            name: each.detach().contiguous().reshape(-1).view(torch.uint8)
            for name, each in tensors.items()
            if each.device == device
        }
        flat = torch.cat(list(here.values())).cpu()
        for name, content in zip(here, flat.split([len(each) for each in here.values()]), strict=True):
            found[name] = content.clone().view(tensors[name].dtype).reshape(tensors[name].shape)
    return {name: found[name] for name in tensors}


def send_together(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Copy tensors from the CPU to a device in one asynchronous transfer. If the device is the CPU, the same tensors are returned."""
    if torch.device(device).type == "cpu":
        return list(tensors)
    begins, end = list[int](), 0
    for each in tensors:
        begins.append(end)
        end += math.ceil(each.nbytes / ALIGNED) * ALIGNED
    here = torch.empty(end, dtype=torch.uint8)
    for begin, each in zip(begins, tensors, strict=True):
        here[begin : begin + each.nbytes].view(each.dtype).copy_(each.reshape(-1))
    if torch.device(device).type == "cuda":
        here = here.pin_memory()  # pageable memory would need another copy and a wait
    there = here.to(device, non_blocking=True)
    return [
        there[begin : begin + each.nbytes].view(each.dtype).view(each.shape)
        for begin, each in zip(begins, tensors, strict=True)
    ]


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file on the CPU. Raises DataError if the file cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (OSError, RuntimeError, SafetensorError) as error:
        # The library maps the file, and reports system errors with its own messages.
        text = " ".join(str(error).split())
        reason = f"{text or type(error).__name__}. Check whether it is truncated, and restore it from a copy."
        if os.strerror(errno.EIO).lower() in text.lower():
            reason = REASONS[errno.EIO]
        raise DataError(f"{file} cannot be read: {reason}") from error


def packed(plain: object, tensors: Mapping[str, Tensor]) -> bytes:
    """Return a JSON value and tensors as bytes that `unpacked` can read. Floats in the JSON value may be infinite or NaN."""
    from safetensors.torch import save

    text = json.dumps(plain).encode()
    held = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    return len(text).to_bytes(8, "little") + text + save(held)


def unpacked(data: bytes) -> tuple[Any, dict[str, Tensor]]:
    """Return the JSON value and the tensors from bytes that `packed` returned. The tensors are on the CPU."""
    from safetensors.torch import load

    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), load(data[end:])


# -------- Shared memory: one process writes, the other reads.
#
# The memory is an unnamed open file, in the kernel's memory on Linux and on the disk elsewhere, so that it ends with the last
# process that holds it. /dev/shm is not used: in containers it often has 64 MiB.

Layout = Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]]
"""Mapping from the name of each policy to the names of its tensors, with the data type and shape of each tensor."""

ALIGNED = 64
"""Alignment of tensors in bytes, which is the same as in memory that torch allocates."""


def layout_of(tensors: Mapping[str, Mapping[str, Tensor]]) -> Layout:
    """Return the layout of tensors, which are given by policy and by name."""
    return {
        policy: {
            key: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for key, tensor in own.items()
        }
        for policy, own in tensors.items()
    }


class SharedTensors:
    """The tensors of a layout in shared memory, which a child process can inherit through a file descriptor."""

    def __init__(self, layout: Layout, descriptor: int | None = None) -> None:
        """Create the memory, or use the memory of a file descriptor. The descriptor is closed with this object."""
        begins: dict[tuple[str, str], int] = {}
        end = 0
        for policy, own in layout.items():
            for key, (dtype, shape) in own.items():
                begins[policy, key] = end
                size = math.prod(shape) * getattr(torch, dtype).itemsize
                end += math.ceil(size / ALIGNED) * ALIGNED
        end = max(end, 1)  # empty memory cannot be mapped
        if descriptor is not None:
            self.descriptor = descriptor
        else:
            if hasattr(os, "memfd_create"):
                self.descriptor = os.memfd_create("kapelle-weights")
            else:  # macOS
                self.descriptor, path = tempfile.mkstemp(prefix="kapelle-weights-")
                Path(path).unlink()
            os.ftruncate(self.descriptor, end)
        self._map = mmap.mmap(self.descriptor, end)
        self._tensors: dict[str, dict[str, Tensor]] = {policy: {} for policy in layout}
        for policy, own in layout.items():
            for key, (name, shape) in own.items():
                count, dtype = math.prod(shape), getattr(torch, name)
                self._tensors[policy][key] = (
                    torch.frombuffer(self._map, dtype=dtype, count=count, offset=begins[policy, key]).view(
                        shape
                    )
                    if count
                    else torch.empty(shape, dtype=dtype)
                )

    def __contains__(self, policy: str) -> bool:
        """Return whether the layout contains a policy."""
        return policy in self._tensors

    def __getitem__(self, policy: str) -> Mapping[str, Tensor]:
        """Return the tensors of a policy by name. The tensors are on the CPU."""
        return self._tensors[policy]

    def close(self) -> None:
        """Close the file descriptor. The memory is released when the tensors are released."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
