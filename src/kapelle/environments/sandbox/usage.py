"""Measure the resource use of the processes in a sandbox, either as a sum over /proc or as reported by a cgroup.

The resource limits of the kernel apply to single processes. This module adds up all processes of a run, so that many small
processes cannot exceed the limits together. A quantity that /proc does not report is counted at its maximum: pipes and sockets
count as full, and shared anonymous memory counts as fully used.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import secrets
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.seccomp import SHARED_ANONYMOUS_BYTES
from kapelle.errors import SandboxError

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PIPE_BYTES = 65536
"""Size of a full pipe in bytes. The system call filter prevents larger pipes."""
_LIBC = ctypes.CDLL(None)
_KCMP, _KCMP_VM = {"x86_64": 312, "aarch64": 272}, 1
_MAPPINGS_BYTES = 1 << 19
"""Maximum size in bytes of /proc/<pid>/maps that is read. This is enough for about ten thousand mappings, a hundred times as
many as Python with libraries has."""
_LOCK_BYTES = 256
"""Upper bound in bytes on the kernel memory of one record lock. The kernel does not limit the number of locks."""
_LOCKS_BYTES = 1 << 17
"""Maximum size in bytes of /proc/locks that is read. This is enough for about two thousand locks; a database has a few."""
_LOCKED = re.compile(rb" ([0-9a-f]+:[0-9a-f]+:[0-9]+) ")
"""Regular expression for the device (hexadecimal) and the inode in a line of /proc/locks."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that a run uses at one moment."""

    cpu_s: float
    memory_bytes: int
    files: int
    countable: bool = True
    """Whether the resource use can be counted completely. False if the run has more mappings or locks than are read, a lock on
    a file of the host, or an item that cannot be read; no honest program has any of these."""


def usage_of(init_pid: int, mounts: tuple[str, ...], memory_limit: int) -> Usage:
    """Return the resource use of a process and all its descendants, including the tmpfs `mounts` in their file system.

    A process that exits while it is read counts as zero. Memory that several processes share is divided among these processes
    only if the simple sum exceeds the limit, because the divided values are slower to read.
    """
    locked = lock_bytes(init_pid, mounts)
    cpu_ticks, countable = 0, locked is not None
    held, shared, holders, descriptors = [], set[bytes](), list[Path](), 0
    waiting = [init_pid]
    while waiting:
        pid = waiting.pop()
        try:
            threads = _threads(pid)
            waiting += _children(threads)
            cpu_ticks += sum(int(ticks) for ticks in _stat(Path(f"/proc/{pid}"))[11:15])
            descriptors += sum(len(_names(thread / "fd")) for thread in threads)
            holders += threads
            found = _private_bytes(pid, threads)
            if found is not None:
                held.append(found)
                shared |= _shared_anonymous(found[0])
        except OverflowError:
            countable = False
        except PermissionError:
            # The kernel also reports this for a process that is ending.
            countable = countable and not _has_memory(pid)
        except (OSError, ValueError, IndexError):
            continue
    files, written = written_by(init_pid, mounts)
    kept = len(shared) * SHARED_ANONYMOUS_BYTES + _socket_bytes(init_pid) + written + (locked or 0)
    private = sum(size for _, size in held)
    if private + kept + descriptors * _PIPE_BYTES > memory_limit:
        # Each pipe is read only in this case, because there may be thousands.
        kept += _pipe_bytes(holders)
    if private + kept > memory_limit:
        private = _divided(held, memory_limit - kept)
    return Usage(cpu_ticks / _TICKS_PER_S, private + kept, files, countable)


def longest_wait_s(init_pid: int) -> float:
    """Return the longest time in seconds that any thread of a process or its descendants has waited for a CPU core.

    Threads and processes that have exited are not counted. The result is 0 if the kernel does not report waiting times.
    """
    waited, waiting = 0, [init_pid]
    while waiting:
        with contextlib.suppress(OSError):
            threads = _threads(waiting.pop())
            waiting += _children(threads)
            for thread in threads:
                with contextlib.suppress(OSError, ValueError, IndexError):
                    waited = max(waited, int((thread / "schedstat").read_bytes().split()[1]))
    return waited / 1e9


def times_of(init_pid: int) -> tuple[float, float]:
    """Return the total CPU time of a process and all its descendants and the part spent in the kernel, both in seconds."""
    everywhere, in_kernel, waiting = 0, 0, [init_pid]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):  # the process has ended
            waiting += _children(_threads(pid))
            ticks = [int(field) for field in _stat(Path(f"/proc/{pid}"))[11:15]]
            everywhere, in_kernel = everywhere + sum(ticks), in_kernel + ticks[1] + ticks[3]
    return everywhere / _TICKS_PER_S, in_kernel / _TICKS_PER_S


def written_by(init_pid: int, mounts: tuple[str, ...]) -> tuple[int, int]:
    """Return the number of files in the tmpfs `mounts` that a process sees, and the total size of these files in bytes."""
    files, size = 0, 0
    for mount in mounts:
        try:
            # The mount point itself cannot be renamed or replaced from inside the sandbox.
            status = os.statvfs(f"/proc/{init_pid}/root{mount}")
        except OSError:
            continue
        files += status.f_files - status.f_ffree
        size += (status.f_blocks - status.f_bfree) * status.f_frsize
    return files, size


def parent_of(pid: int) -> int:
    """Return the process id of the parent of a process, or 0 if the process does not exist."""
    try:
        return int(_stat(Path(f"/proc/{pid}"))[1])
    except (OSError, ValueError, IndexError):
        return 0


def _stat(process: Path) -> list[bytes]:
    # The name is in parentheses and may contain any byte, including parentheses and spaces.
    return (process / "stat").read_bytes().rpartition(b")")[2].split()


def _threads(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def _children(threads: list[Path]) -> list[int]:
    found: list[int] = []
    for thread in threads:
        # Some threads may end during the reading; the other threads and their children are still counted.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (thread / "children").read_bytes().split())
    return found


def _has_memory(pid: int) -> bool:
    try:
        return any(b"RssAnon:" in (thread / "status").read_bytes() for thread in _threads(pid))
    except OSError:
        return False


def _private_bytes(pid: int, threads: list[Path]) -> tuple[Path, int] | None:
    """Return the file that was read and the size in bytes of the anonymous memory and page tables of a process.

    The memory includes pages that are shared with forked processes. These numbers are read from any thread that has not exited,
    because the first thread may exit before the others.
    """
    for place in (Path(f"/proc/{pid}"), *threads):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            size = _sum_of(place / "status", (b"RssAnon:", b"VmSwap:", b"VmPTE:"))
            if size is not None:
                return place, size
    return None


def _each_once(held: list[tuple[Path, int]]) -> list[tuple[Path, int]]:
    """Return one process for each address space.

    A child of `vfork` shares the memory of its parent until the child starts its program.
    """
    found: list[tuple[Path, int]] = []
    for place, size in held:
        if not any(_is_one_memory(place, other) for other, _ in found):
            found.append((place, size))
    return found


def _is_one_memory(place: Path, other: Path) -> bool:
    """Return whether two processes share one address space, according to kcmp(2); False if the call is not permitted."""
    number = _KCMP.get(platform.machine())
    return number is not None and _LIBC.syscall(number, int(place.name), int(other.name), _KCMP_VM, 0, 0) == 0


def _divided(held: list[tuple[Path, int]], room: int) -> int:
    """Return the total memory of the processes, with shared memory divided among the processes that share it.

    If the sum exceeds `room`, a partial sum is returned immediately, because processes may grow while they are read.
    """
    total = 0
    for place, size in sorted(_each_once(held), key=lambda one: -one[1]):
        try:
            # The kernel divides memory that several processes share by the number of these processes.
            divided = _sum_of(place / "smaps_rollup", (b"Pss_Anon:", b"SwapPss:"))
            tables = _sum_of(place / "status", (b"VmPTE:",)) or 0
            total += size if divided is None else min(divided + tables, size)
        except OSError:
            # The process is not readable, or it has ended and has no memory.
            total += size if _has_memory(int(place.parts[2])) else 0
        if total > room:
            break
    return total


def _sum_of(file: Path, names: tuple[bytes, ...]) -> int | None:
    lines = [line.split() for line in file.read_bytes().splitlines() if line.startswith(names)]
    return sum(int(line[1]) * 1024 for line in lines) if lines else None


def _shared_anonymous(thread: Path) -> set[bytes]:
    """Return the names of the regions of shared anonymous memory that a process maps.

    Raises OverflowError if there are too many mappings to read.
    """
    text = _all_of(thread / "maps", _MAPPINGS_BYTES)
    if b"/dev/zero" not in text:
        return set()
    return {
        b"".join(line.split()[3:5]) for line in text.splitlines() if line.endswith(b"/dev/zero (deleted)")
    }


def _all_of(file: Path, most: int) -> bytearray:
    """Return the content of a kernel file; raise OverflowError if the file has more than `most` bytes."""
    text = bytearray()
    with file.open("rb", buffering=0) as source:
        while chunk := source.read(65536):
            text += chunk
            if len(text) > most:
                raise OverflowError
    return text


def lock_bytes(init_pid: int, mounts: tuple[str, ...]) -> int | None:
    """Return the size in bytes of the kernel memory that holds the record locks of the run.

    The result is None if there are more locks than are read, or if a lock is on a file outside the tmpfs `mounts` of the run,
    because the host or another run may wait for such a lock.
    """
    try:
        # The run's own /proc lists only the locks of the run.
        lines = _all_of(Path(f"/proc/{init_pid}/root", "proc/locks"), _LOCKS_BYTES).splitlines()
        # The second condition is true if the process shares this process's pid namespace; such a sandbox is rejected elsewhere.
        if not lines or Path(f"/proc/{init_pid}/ns/pid").readlink() == Path("/proc/self/ns/pid").readlink():
            return 0
        devices = (os.stat(f"/proc/{init_pid}/root{mount}").st_dev for mount in mounts)  # noqa: PTH116
        # The format of /proc/locks.
        own = {f"{os.major(device):02x}:{os.minor(device):02x}".encode() for device in devices}
    except OverflowError:
        return None
    except OSError:
        return 0
    if any(place.rpartition(b":")[0] not in own for line in lines for place in _LOCKED.findall(line)):
        return None
    return len(lines) * _LOCK_BYTES


def _pipe_bytes(threads: list[Path]) -> int:
    """Return the maximum number of bytes in pipes with open descriptors.

    Each thread may have its own table of descriptors, so the descriptors of all threads are counted.
    """
    pipes = set[tuple[int, int]]()
    with contextlib.suppress(OSError):  # no descriptors are left; the next measurement reports this
        for folder in (thread / "fd" for thread in threads):
            for name in _names(folder):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                    status = os.stat(f"{folder}/{name}")  # noqa: PTH116
                    if stat.S_ISFIFO(status.st_mode):
                        pipes.add((status.st_dev, status.st_ino))
        return len(pipes) * _PIPE_BYTES
    return 0


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return os.listdir(folder)  # noqa: PTH208 (many names, every few milliseconds)
    return []


def _socket_bytes(init_pid: int) -> int:
    """Return the maximum number of bytes in all Unix sockets of the run, including sockets in transit and in queues."""
    try:
        sockets = Path(f"/proc/{init_pid}/net/unix").read_bytes().count(b"\n") - 1
    except OSError:
        return 0
    return max(sockets, 0) * _most_of_a_socket()


@functools.cache
def _most_of_a_socket() -> int:
    # The kernel stops a sender above its limit, and one write is at most half of the limit.
    return int(Path("/proc/sys/net/core/wmem_default").read_text()) * 3 // 2


def tcp_bytes(init_pid: int) -> int:
    """Return an upper estimate in bytes of the queues of all TCP sockets in the network of a run.

    The estimate is twice the number of queued bytes, to include the overhead of the kernel.
    """
    held = 0
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{init_pid}/net/{name}").read_text().splitlines()[1:]:
                sending, _, waiting = line.split()[4].partition(":")
                held += int(sending, 16) + int(waiting, 16)
    return 2 * held


# -------- The CPU time of a process and all its descendants, including those that ended and were never waited for
#
# /proc adds the time of a child to its parent when the parent waits for the child. A parent that ignores SIGCHLD never waits, so
# the time of its children is lost. A performance counter that children inherit keeps this time (perf_event_open(2)).

_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_SIZE = 64
"""Size in bytes of the first published version of `struct perf_event_attr`, which every kernel accepts."""
_SOFTWARE, _TASK_CLOCK = 1, 1
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_CLOSE_ON_EXEC = 8


@functools.cache
def task_clock_works() -> bool:
    """Return whether this process may use performance counters.

    Performance counters are not permitted in containers or if `kernel.perf_event_paranoid` is above 2.
    """
    try:
        os.close(open_clock(0))
    except OSError:
        return False
    return True


def open_clock(pid: int) -> int:
    """Return the descriptor of a clock that counts the CPU time of a process and of the processes that it starts later.

    Process id 0 denotes the current process. Raises OSError if the clock is not permitted.
    """
    number = _PERF_EVENT_OPEN.get(platform.machine())
    if number is None:
        raise OSError(f"the system call number of perf_event_open on {platform.machine()} is not known")
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
    """Return the CPU time in seconds that a clock has counted so far."""
    return int.from_bytes(os.read(fd, 8), "little") / 1e9


# -------- The strong mode: a cgroup for each run, in which the kernel limits memory and processes, counts CPU time, and kills all
# processes
#
# This mode needs cgroup v2 and a cgroup folder that this process may use: either a folder that systemd has delegated
# (`systemd-run --user --scope --property=Delegate=yes kapelle train …`), or a folder with `memory` and `pids` in its
# `cgroup.subtree_control`, if this process is in the folder's child `kapelle`.

LEAF = "kapelle"
"""Name of the cgroup of the kapelle process itself. The process is in a separate cgroup, because a cgroup with processes may
not have children with controllers."""
_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_CONTROLLERS = ("memory", "pids")
_RUN = "run-"
_OVERHEAD = 4
"""Number of processes of a sandbox in addition to those of the program, such as bubblewrap and the shell that waits for the
program."""
_GONE_WITHIN_S = 0.4


class RunCgroup:
    """The cgroup of one run."""

    def __init__(self, parent: Path, limits: Limits) -> None:
        """Create an empty cgroup with the given limits; raise SandboxError if the kernel does not allow it."""
        self._folder = parent / f"{_RUN}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            self._folder.mkdir()
            self._write("memory.max", limits.memory_bytes)
            self._write("memory.oom.group", 1)
            self._write("pids.max", limits.processes + _OVERHEAD)
            with contextlib.suppress(FileNotFoundError):  # the kernel has no swap accounting
                self._write("memory.swap.max", 0)
        except OSError as error:
            self.close()
            raise SandboxError(f"No cgroup can be made in {parent}: {error.strerror}.") from error

    def add(self, pid: int) -> None:
        """Move a process into the cgroup; raise SandboxError if this fails.

        Children that the process starts later are also in the cgroup.
        """
        try:
            self._write("cgroup.procs", pid)
        except OSError as error:
            raise SandboxError(
                f"A sandbox cannot be moved to the cgroup {self._folder}: {error.strerror}."
            ) from error

    def cpu_s(self) -> float:
        """Return the total CPU time in seconds of all processes that have ever run in the cgroup."""
        return self._numbers("cpu.stat").get("usage_usec", 0) / 1e6

    def memory_bytes(self) -> int:
        """Return the size in bytes of the memory of the cgroup that the kernel cannot reclaim.

        This is all memory except pages of files that are also on disk.
        """
        held = self._numbers("memory.stat")
        return int((self._folder / "memory.current").read_text()) - held.get("file", 0) + held.get("shmem", 0)

    def ran_out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process in the cgroup because the memory of the cgroup was full."""
        return self._numbers("memory.events").get("oom_kill", 0) > 0

    def kill(self) -> None:
        """Kill all processes in the cgroup at once."""
        with contextlib.suppress(OSError):
            self._write("cgroup.kill", 1)

    def close(self) -> None:
        """Remove the cgroup after its killed processes have exited.

        If they take too long to exit, the cgroup is removed when another cgroup is closed.
        """
        until = time.monotonic() + _GONE_WITHIN_S
        _left.add(self._folder)
        while True:
            for folder in tuple(_left):
                with contextlib.suppress(OSError):  # some killed processes have not ended yet
                    with contextlib.suppress(FileNotFoundError):
                        folder.rmdir()
                    _left.discard(folder)
            if self._folder not in _left or time.monotonic() > until:
                return
            self.kill()
            time.sleep(0.005)

    def _write(self, name: str, value: int) -> None:
        # Never create the file: a missing file means that the kernel does not support the setting.
        with (self._folder / name).open("r+") as file:
            file.write(str(value))

    def _numbers(self, name: str) -> dict[str, int]:
        rows = (line.split() for line in (self._folder / name).read_text().splitlines())
        return {row[0]: int(row[1]) for row in rows if len(row) == 2}


_left: set[Path] = set()
"""Cgroups of finished runs whose killed processes have not exited yet."""


@functools.cache
def strong_or_why_not() -> Path | str:
    """Return the folder in which cgroups of runs can be created, or the reason why there is no such folder."""
    try:
        return find_folder(_ROOT, _OWN)
    except SandboxError as error:
        return str(error)


def find_folder(root: Path, own: Path) -> Path:
    """Return the folder in which cgroups of runs can be created.

    `root` is a cgroup file system, and `own` is a file in the format of /proc/self/cgroup. Raises SandboxError with the reason
    if there is no such folder.
    """
    paths = [line.removeprefix("0::/") for line in own.read_text().splitlines() if line.startswith("0::/")]
    if not paths or not (root / "cgroup.controllers").is_file():
        raise SandboxError("cgroup v2 is not mounted as the only cgroup hierarchy")
    here = root / paths[0]
    folder = here.parent if here.name == LEAF else here
    missing = [
        name for name in _CONTROLLERS if name not in (folder / "cgroup.controllers").read_text().split()
    ]
    if missing:
        raise SandboxError(f"{folder} has no controller {' and '.join(missing)}")
    if not os.access(folder, os.W_OK):
        raise SandboxError(f"{folder} is not delegated to this user")
    if here == folder:
        # systemd marks a cgroup in which processes may create child cgroups.
        marks = []
        for name in ("user.delegate", "trusted.delegate"):
            with contextlib.suppress(OSError):
                marks.append(os.getxattr(folder, name))
        if b"1" not in marks:
            raise SandboxError(
                f"{folder} is not delegated; start kapelle with `systemd-run --user --scope --property=Delegate=yes`"
            )
    try:
        if here == folder:
            # The children of a cgroup with processes have no controllers, so move the processes into the child `kapelle`.
            (folder / LEAF).mkdir(exist_ok=True)
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (folder / LEAF / "cgroup.procs").write_text(pid)
        control = folder / "cgroup.subtree_control"
        not_yet = [name for name in _CONTROLLERS if name not in control.read_text().split()]
        if not_yet:
            control.write_text(" ".join(f"+{name}" for name in not_yet))
    except OSError as error:
        raise SandboxError(
            f"The cgroup controllers of {folder} cannot be enabled for its children: {error.strerror}"
        ) from error
    if not (folder / LEAF / "cgroup.kill").is_file():
        raise SandboxError("this kernel has no cgroup.kill; upgrade to Linux 5.14 or newer")
    # Remove the cgroups of runs whose trainer was killed; the kernel keeps cgroups with living processes.
    for left in folder.glob(f"{_RUN}*"):
        if not Path("/proc", left.name.removeprefix(_RUN).partition("-")[0]).exists():
            with contextlib.suppress(OSError):
                left.rmdir()
    return folder
