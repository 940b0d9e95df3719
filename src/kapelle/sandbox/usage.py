"""What the processes of a sandbox use now, read from /proc without trusting anything in them.

Resource limits of the kernel bind single processes; this sums over all of a run's processes, so that many small ones
cannot do what one large one may not. What /proc does not tell is counted as the most that it can be: a pipe or a
socket as full, shared anonymous memory as touched.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kapelle.sandbox.seccomp import SHARED_ANONYMOUS_BYTES

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PIPE_BYTES = 65536
"""What a pipe holds; the filter refuses to make it larger."""
_MAPPINGS_BYTES = 1 << 19
"""Of /proc/<pid>/maps: some ten thousand mappings, a hundred times what a Python with libraries has."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of one run at one moment."""

    cpu_s: float
    memory_bytes: int
    files: int
    countable: bool = True
    """False when something cannot be counted that no honest program has: more mappings than are read, or what may not
    be read."""


def usage_of(init_pid: int, mounts: tuple[str, ...], memory_limit: int) -> Usage:
    """Return what a process and all its descendants use, with the tmpfs `mounts` that they see.

    A process that ends while it is read counts as nothing. Memory that several processes share is divided among them
    only when the plain sum is above the limit: that is slower to read.
    """
    cpu_ticks, countable = 0, True
    held, shared, pipes = [], set[bytes](), set[tuple[int, int]]()
    waiting = [init_pid]
    while waiting:
        pid = waiting.pop()
        try:
            threads = _threads(pid)
            waiting += _children(threads)
            cpu_ticks += _cpu_ticks(pid)
            pipes |= _pipes(threads)
            found = _private_bytes(pid, threads)
            if found is not None:
                held.append(found)
                shared |= _shared_anonymous(found[0])
        except OverflowError:
            countable = False
        except PermissionError:
            # The kernel says so of a process that is ending, too.
            countable = countable and not _has_memory(pid)
        except (OSError, ValueError, IndexError):
            continue
    kept = len(shared) * SHARED_ANONYMOUS_BYTES + len(pipes) * _PIPE_BYTES + _socket_bytes(init_pid)
    files, written = written_by(init_pid, mounts)
    kept += written
    private = sum(size for _, size in held)
    if private + kept > memory_limit:
        private = sum(_divided_bytes(place, size) for place, size in held)
    return Usage(cpu_ticks / _TICKS_PER_S, private + kept, files, countable)


def written_by(init_pid: int, mounts: tuple[str, ...]) -> tuple[int, int]:
    """Return the number of files in the tmpfs `mounts` that a process sees, and their bytes."""
    files, size = 0, 0
    for mount in mounts:
        try:
            # The mount point itself cannot be renamed or replaced from within.
            status = os.statvfs(f"/proc/{init_pid}/root{mount}")
        except OSError:
            continue
        files += status.f_files - status.f_ffree
        size += (status.f_blocks - status.f_bfree) * status.f_frsize
    return files, size


def parent_of(pid: int) -> int:
    """Return the parent of a process, 0 when there is no such process."""
    try:
        return int(_stat(Path(f"/proc/{pid}"))[1])
    except (OSError, ValueError, IndexError):
        return 0


def _stat(process: Path) -> list[bytes]:
    # The name stands in parentheses and may hold any byte, parentheses and spaces included.
    return (process / "stat").read_bytes().rpartition(b")")[2].split()


def _threads(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def _children(threads: list[Path]) -> list[int]:
    found: list[int] = []
    for thread in threads:
        # Of many threads some end while they are read: that hides neither the others nor their children.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (thread / "children").read_bytes().split())
    return found


def _cpu_ticks(pid: int) -> int:
    return sum(int(ticks) for ticks in _stat(Path(f"/proc/{pid}"))[11:15])


def _has_memory(pid: int) -> bool:
    try:
        return any(b"RssAnon:" in (thread / "status").read_bytes() for thread in _threads(pid))
    except OSError:
        return False


def _private_bytes(pid: int, threads: list[Path]) -> tuple[Path, int] | None:
    """Return the anonymous memory of a process, what it shares with its forks included, and where that was read.

    Any living thread tells: the first one may have ended, and then does not.
    """
    for place in (Path(f"/proc/{pid}"), *threads):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            size = _sum_of(place / "status", (b"RssAnon:", b"VmSwap:"))
            if size is not None:
                return place, size
    return None


def _divided_bytes(place: Path, size: int) -> int:
    """Return the same, with what several processes share divided by their number; `size` where that is not told."""
    try:
        divided = _sum_of(place / "smaps_rollup", (b"Pss_Anon:", b"SwapPss:"))
    except OSError:
        return size
    return size if divided is None else min(divided, size)


def _sum_of(file: Path, names: tuple[bytes, ...]) -> int | None:
    lines = [line.split() for line in file.read_bytes().splitlines() if line.startswith(names)]
    return sum(int(line[1]) * 1024 for line in lines) if lines else None


def _shared_anonymous(thread: Path) -> set[bytes]:
    """Return names of the pieces of shared anonymous memory that a process maps, or the start of one.

    Raises OverflowError when there are too many mappings to read.
    """
    with (thread / "maps").open("rb", buffering=0) as file:
        text = bytearray()
        while chunk := file.read(65536):
            text += chunk
            if len(text) > _MAPPINGS_BYTES:
                raise OverflowError
    if b"/dev/zero" not in text:
        return set()
    return {
        b"".join(line.split()[3:5]) for line in text.splitlines() if line.endswith(b"/dev/zero (deleted)")
    }


def _pipes(threads: list[Path]) -> set[tuple[int, int]]:
    """Return the pipes that a process holds; each thread may have descriptors of its own."""
    held = (status for thread in threads for status in _descriptors(thread / "fd"))
    return {(status.st_dev, status.st_ino) for status in held if stat.S_ISFIFO(status.st_mode)}


def _descriptors(folder: Path) -> Iterator[os.stat_result]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 (many, every few milliseconds)
    except (FileNotFoundError, ProcessLookupError):
        return
    for name in names:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield os.stat(f"{folder}/{name}")  # noqa: PTH116


def _socket_bytes(init_pid: int) -> int:
    """Return the most that all Unix sockets of the run can hold, those on their way and in queues included."""
    try:
        sockets = Path(f"/proc/{init_pid}/net/unix").read_bytes().count(b"\n") - 1
    except OSError:
        return 0
    return max(sockets, 0) * _most_of_a_socket()


@functools.cache
def _most_of_a_socket() -> int:
    # A sender is stopped once it is over its bound, and writes half of that at once.
    return int(Path("/proc/sys/net/core/wmem_default").read_text()) * 3 // 2
