"""The CPU time of a process and of all its descendants, those included that ended and that nobody waited for.

/proc adds the time of a child to its parent when the parent waits for it. A parent that ignores SIGCHLD never does, and
what such children used is gone. A performance counter that children inherit keeps it (perf_event_open(2)).
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct

_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_SIZE = 64
"""Bytes of the first published `struct perf_event_attr`, which every kernel takes."""
_SOFTWARE, _TASK_CLOCK = 1, 1
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_CLOSE_ON_EXEC = 8


@functools.cache
def works_here() -> bool:
    """Return whether this process may count so: containers and `kernel.perf_event_paranoid` above 2 forbid it."""
    try:
        os.close(open_clock(0))
    except OSError:
        return False
    return True


def open_clock(pid: int) -> int:
    """Return a descriptor of a clock that counts from here on for a process (0: this one) and what it will start.

    Raises OSError where that is not allowed.
    """
    number = _PERF_EVENT_OPEN.get(platform.machine())
    if number is None:
        raise OSError(f"the number of perf_event_open on {platform.machine()} is not known")
    flags = _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
    wanted = ctypes.create_string_buffer(
        struct.pack("=IIQ24xQ16x", _SOFTWARE, _SIZE, _TASK_CLOCK, flags), _SIZE
    )
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.syscall(number, wanted, pid, -1, -1, _CLOSE_ON_EXEC))
    if fd < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return fd


def read_clock(fd: int) -> float:
    """Return the seconds counted so far."""
    return int.from_bytes(os.read(fd, 8), "little") / 1e9
