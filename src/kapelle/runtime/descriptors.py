"""How many things may be open at once: the system bounds the descriptors of a process, most often at 1,024.

Connections, and the pipes to programs, are descriptors. Work that would need more than there are queues instead of
failing.
"""

from __future__ import annotations

import os
from contextlib import suppress

try:
    import resource

    HAS_LIMITS = True
except ModuleNotFoundError:  # Windows
    HAS_LIMITS = False

WANTED = 65_536
"""The soft limit is raised to this number, where the hard limit allows it."""
_WITHOUT_LIMITS = 2048
"""Assumed on Windows, which bounds files and not descriptors."""
_SPARE = 256
"""Left for files and for what is open for a moment only; of a small limit a quarter."""


def raise_limit() -> int:
    """Raise this process's soft limit of descriptors as far as it goes, up to `WANTED`, and return it."""
    if not HAS_LIMITS:
        return _WITHOUT_LIMITS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return WANTED if soft == resource.RLIM_INFINITY else soft
    with suppress(ValueError, OSError):  # some systems have a bound of their own below the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def room_for(each: int, most: int) -> int:
    """Return how many things with `each` descriptors may be open at once beside what is open now: 1 to `most`."""
    if each < 1:
        return most
    limit = raise_limit()
    left = limit - _in_use() - min(_SPARE, limit // 4)
    return max(1, min(most, left // each))


def _in_use() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (a list of names is all that is asked)
    except OSError:
        return 64
