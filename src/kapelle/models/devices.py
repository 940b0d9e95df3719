"""Devices, checked before anything is put on them, and the memory that a process keeps."""

from __future__ import annotations

import ctypes
import functools
import os

from kapelle.errors import ConfigError

KEPT = 1 << 30
"""Most free bytes at the heap's end before they are returned to the system."""

MAPPED = 1 << 25
"""Bytes from which a block is mapped separately; the largest value that every glibc accepts."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def check_device(device: str | None, setting: str) -> None:
    """Raise ConfigError, which names the setting, when nothing can be put on this device; None is any that is there."""
    if device in {None, "cpu"}:
        return  # without torch, so that a recipe is read in no time
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"`{setting}: {device}` cannot be used: {reason}. Set `cpu`, or a device that is there."
        ) from error


@functools.cache
def keep_freed_memory() -> bool:
    """Have this process's allocator keep freed memory, once; False if it is not glibc's or the user configured it.

    glibc returns free memory at the end of the heap to the system, and maps large blocks anew at every use: the first
    access to each page is then a fault, and the system clears the page. An update's tensors are as large as the last
    update's, so that returned memory is requested again within milliseconds.
    """
    if any(os.environ.get(name) for name in _USER_SETTINGS) or os.name != "posix":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # macOS has none, and that of musl does nothing and returns 0.
    return mallopt is not None and mallopt(_TRIM_THRESHOLD, KEPT) == 1 == mallopt(_MMAP_THRESHOLD, MAPPED)
