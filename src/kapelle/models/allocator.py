"""Keeps memory that tensors have freed, so that the next tensors need not ask the system for it again.

glibc gives the system back what lies free at the end of the heap, and maps large blocks anew at every use: each
first touch of a page is then a fault, and the system clears the page. An update's tensors are as large as the last
update's, so that what was given back is asked for again within milliseconds.
"""

from __future__ import annotations

import ctypes
import functools
import os

KEPT = 1 << 30
"""Most bytes that lie free at the heap's end before they are given back."""

MAPPED = 1 << 25
"""Bytes from which a block is mapped by itself; the largest that every glibc takes."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_SAYS_OTHERWISE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Tell this process's allocator so, once; False where it is another than glibc's or was told otherwise."""
    if any(os.environ.get(name) for name in _SAYS_OTHERWISE) or os.name != "posix":
        return False
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    # macOS has none, and that of musl does nothing and says 0.
    return tell is not None and tell(_TRIM_THRESHOLD, KEPT) == 1 == tell(_MMAP_THRESHOLD, MAPPED)
