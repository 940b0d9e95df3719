"""Keeps freed memory in the process, so that the next tensors need not request it from the system again.

glibc returns free memory at the end of the heap to the system, and maps large blocks anew at every use: the first
access to each page is then a fault, and the system clears the page. An update's tensors are as large as the last
update's, so that returned memory is requested again within milliseconds.
"""

from __future__ import annotations

import ctypes
import functools
import os

KEPT = 1 << 30
"""Most free bytes at the heap's end before they are returned to the system."""

MAPPED = 1 << 25
"""Bytes from which a block is mapped separately; the largest value that every glibc accepts."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Configure this process's allocator, once; False if it is not glibc's or the user configured it."""
    if any(os.environ.get(name) for name in _USER_SETTINGS) or os.name != "posix":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # macOS has none, and that of musl does nothing and returns 0.
    return mallopt is not None and mallopt(_TRIM_THRESHOLD, KEPT) == 1 == mallopt(_MMAP_THRESHOLD, MAPPED)
