"""Run programs in bubblewrap sandboxes, with new namespaces, a read-only system, an unprivileged user and no network.

Every run starts these programs in this order:

    prlimit → setpriv (root only: another uid) → bwrap (namespaces, filter) → sh (unpacks files, sets limits) → command

The shell that unpacks the files is process 1 of the new pid namespace. The shell waits for the command and reaps the processes
that the command leaves behind. When the shell exits or is killed, the kernel kills all other processes in the namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import json
import math
import os
import pwd
import re
import resource
import secrets
import select
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kapelle.environments.sandbox.contract import Layer, Limits, check_files
from kapelle.environments.sandbox.seccomp import filter_program
from kapelle.environments.sandbox.session import BEGIN_WITHIN_S, Opening, ProcessGroup, Session
from kapelle.environments.sandbox.usage import (
    RunCgroup,
    Usage,
    lock_bytes,
    longest_wait_s,
    open_clock,
    parent_of,
    read_clock,
    strong_or_why_not,
    task_clock_works,
    tcp_bytes,
    times_of,
    usage_of,
    written_by,
)
from kapelle.errors import SandboxError

# -------- The arguments of bubblewrap: one entry for each layer, the system's files, and the sizes from the limits

WORK = "/box"
"""Path of the work directory inside the sandbox, which is also the directory for temporary files."""
TEMPORARY = "/tmp"  # noqa: S108 (inside the sandbox, a link to the work directory)
SHARED_MEMORY = "/dev/shm"  # noqa: S108 (inside the sandbox, a separate tmpfs)
ENVIRONMENT = {
    "HOME": WORK,
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    # The same program with the same input produces the same output in every run.
    "PYTHONHASHSEED": "0",
}
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_SIGNALS = 1024
"""Maximum number of signals that may be queued for a run. The limit exists because the kernel stores each queued signal."""
_UID_MAP = Path("/proc/self/uid_map")
_PRESSURE = "/proc/pressure"
# Through these files, anyone may set triggers that make the kernel watch the entire machine. Some kernels lack these files.
_WITHOUT_PRESSURE = (
    ("--size", "4096", "--tmpfs", _PRESSURE, "--remount-ro", _PRESSURE) if Path(_PRESSURE).is_dir() else ()
)
# Programs must not see the host's hardware or how the host was started.
_OF_THE_HOST = tuple(
    f"/proc/{name}"
    for name in (
        "cmdline",
        "config.gz",
        "diskstats",
        "interrupts",
        "key-users",
        "keys",
        "modules",
        "partitions",
    )
    if Path(f"/proc/{name}").exists()
)
# Each layer of protection is one entry. The tests remove one entry at a time and check that a hostile program then succeeds.
LAYERS: Mapping[str, tuple[str, ...]] = {
    "user namespace": ("--unshare-user", "--uid", "1000", "--gid", "1000", "--disable-userns"),
    # A tmpfs covers /proc/1: a program has the same user id as process 1 and could otherwise write to the memory of process 1,
    # which must end with the supervisor.
    "pid namespace": (
        *("--unshare-pid", "--as-pid-1", "--proc", "/proc"),
        *("--size", "4096", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"),
        *_WITHOUT_PRESSURE,
        *(part for name in _OF_THE_HOST for part in ("--ro-bind", "/dev/null", name)),
    ),
    "network namespace": ("--unshare-net",),
    "ipc, uts and cgroup namespaces": (
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--hostname",
        "kapelle",
    ),
    "cleared environment": ("--clearenv",),
    "session": ("--new-session", "--die-with-parent"),
    "read-only system": ("--remount-ro", "/dev", "--remount-ro", "/"),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """The contents of a sandbox in addition to the system and the work directory; all paths are absolute."""

    folders: tuple[str, ...] = ()
    """Additional writable folders. Each folder is initially empty, is stored in memory, and has the same maximum size as the
    work directory."""
    files: tuple[tuple[str, bytes], ...] = ()
    """Paths and contents of files that no program in the sandbox can change."""
    visible: tuple[str, ...] = ()
    """Files and folders of the host that programs may read at the same path."""
    socket: tuple[str, str] | None = None
    """The path of a Unix socket of the host and the path at which programs in the sandbox connect to it. Programs have no other
    connection to the host."""
    loopback: bool = False
    """Whether programs may use TCP with each other, in a network that belongs to the sandbox, and wait for descriptors with
    epoll, which HTTP clients need."""
    report: tuple[str, ...] = ()
    """Files that process 1 prints after the command has exited and all other processes have been killed; no program can control
    process 1. Each file is printed as one line in base64, and the line is empty if the file is missing or is not a regular
    file. If `report` is set, the run has no other output, and a run that reaches a limit has no report."""


REPORTED_BYTES = 1 << 20
"""Maximum number of bytes of a file that are reported."""
_PLAIN_LAYOUT = Layout()


def check_reachable(path: str) -> None:
    """Raise SandboxError unless the unprivileged user that runs the programs can read a file or enter a folder."""
    found = Path(path)
    if not found.exists():
        raise SandboxError(f"The file or folder {path} does not exist.")
    wanted = stat.S_IROTH | (stat.S_IXOTH if found.is_dir() else 0)
    closed = [each for each in found.resolve().parents if not each.stat().st_mode & stat.S_IXOTH]
    if os.geteuid() == 0 and (closed or found.stat().st_mode & wanted != wanted):
        raise SandboxError(
            f"The unprivileged user that runs the programs cannot read {path}, because other users have no access to "
            f"{closed[-1] if closed else path}. Grant access (`chmod o+rX`), or move it, for example to a folder in /opt."
        )


def arguments(
    limits: Limits,
    interpreter: ReachableInterpreter,
    info_fd: int,
    filter_fd: int | None,
    layout: Layout = _PLAIN_LAYOUT,
    held: Sequence[tuple[str, int]] = (),
) -> list[str]:
    """Return the arguments of bubblewrap for the given limits, without the command.

    `held` contains pairs of a path and a descriptor for the files of the layout.
    """
    layers = dict(LAYERS)
    read_only = layers.pop("read-only system")
    # A /dev with harmless devices. It has no terminals, which could be exhausted, and no /dev/zero, because memory that is mapped
    # from it is not counted.
    devices = ["--size", "65536", "--tmpfs", "/dev"]
    for name in DEVICES:
        devices += ["--dev-bind", name, name]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        devices += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    devices += ["--symlink", "/proc/self/fd", "/dev/fd"]
    # Programs and libraries, and from /etc only the files that the linker needs.
    system = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            system += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            system += ["--ro-bind", str(path), str(path)]
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        system += ["--ro-bind-try", name, name]
    for needed in interpreter.needs:
        system += ["--ro-bind", needed, needed]
    size = str(limits.file_bytes)
    room = [part for folder in layout.folders for part in ("--size", size, "--tmpfs", folder)]
    for shown in layout.visible:
        room += ["--ro-bind", shown, shown]
    for target, fd in held:
        room += ["--perms", "0555", "--ro-bind-data", str(fd), target]
    if layout.socket is not None:
        room += ["--ro-bind", *layout.socket]
    return [
        *(option for layer in layers.values() for option in layer),
        *(part for name, value in ENVIRONMENT.items() for part in ("--setenv", name, value)),
        *system,
        *devices,
        *("--size", size, "--tmpfs", SHARED_MEMORY, "--size", size, "--tmpfs", WORK),
        *("--symlink", WORK.removeprefix("/"), TEMPORARY, "--dir", "/run", "--chdir", WORK),
        *room,
        *read_only,
        *("--info-fd", str(info_fd)),
        *(() if filter_fd is None else ("--seccomp", str(filter_fd))),
    ]


def drop_privileges() -> list[str]:
    """Return the command prefix with which root starts each run as a different unprivileged user; empty unless this process is root.

    Limits on the number of processes do not apply to root, and root could still read files inside a user namespace.
    """
    if os.geteuid() != 0:
        return []
    spare = _spare_uids()
    if not spare:
        raise SandboxError(
            "This process is root in a user namespace that has no other user id under which programs could run "
            "(/proc/self/uid_map). Give the namespace a range of user ids (/etc/subuid, newuidmap), or run as an ordinary user."
        )
    uid = str(spare.start + secrets.randbelow(len(spare)))
    return [
        require("setpriv", "util-linux"),
        "--reuid",
        uid,
        "--regid",
        uid,
        "--clear-groups",
        "--no-new-privs",
    ]


@functools.cache
def _spare_uids() -> range:
    """Return user ids that exist in this user namespace and probably belong to no account.

    A container may have only a few user ids.
    """
    first, _, count = map(int, _UID_MAP.read_text().splitlines()[-1].split())
    end = min(first + count, 2_000_000_000)
    # 65534 is `nobody`, the owner of files without an owner.
    return range(max(end - 100_000, 66_000), end) if end > 66_000 else range(max(end - 4_000, 1), end - 2)


def require(program: str, package: str) -> str:
    """Return the path of a program; if the program is missing, raise SandboxError with the command that installs it."""
    path = shutil.which(program, path="/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin")
    if path is None:
        raise SandboxError(
            f"The sandbox needs the program `{program}`, which is not installed. On Debian and Ubuntu: "
            f"apt-get install {package}; on Fedora: dnf install {package}."
        )
    return path


# -------- Finds a Python interpreter that an unprivileged user can start


@dataclass(frozen=True, slots=True)
class ReachableInterpreter:
    """A Python interpreter and the files that it needs to start."""

    path: str
    needs: tuple[str, ...]
    """Files and folders outside /usr that the interpreter needs. The folder /usr is always visible."""


@functools.cache
def reachable_interpreter() -> ReachableInterpreter:
    """Return the Python interpreter for programs in a sandbox.

    The result is the base interpreter of this process if other users can reach it, otherwise the interpreter of the system.
    Raises SandboxError if there is no such interpreter.
    """
    base = Path(sys.base_prefix).resolve()
    own = Path(os.path.realpath(sys.executable))
    if own.is_relative_to(base) and readable_by_others(own):
        return ReachableInterpreter(str(own), needs(own, base))
    for name in ("/usr/bin/python3", shutil.which("python3", path="/usr/local/bin:/opt/bin:/bin") or ""):
        path = Path(os.path.realpath(name))
        if name and path.is_file() and readable_by_others(path):
            return ReachableInterpreter(str(path), needs(path, path.parent.parent))
    raise SandboxError(
        f"An unprivileged user cannot reach any Python interpreter (not even {own}). "
        "Install the system's interpreter: apt-get install python3."
    )


def needs(executable: Path, prefix: Path) -> tuple[str, ...]:
    """Return only those files and folders below the prefix that an interpreter needs.

    A prefix may be a home directory or ~/.local, where private files are stored next to the libraries.
    """
    if prefix.is_relative_to("/usr"):
        return ()
    homes = [Path.home()]
    with contextlib.suppress(KeyError):  # the owner has no account
        homes.append(Path(pwd.getpwuid(prefix.stat().st_uid).pw_dir))
    lib = prefix / "lib"
    if any(home.resolve().is_relative_to(prefix) for home in homes):
        parts = [*lib.glob("lib*.so*"), *lib.glob("python3*")]
    else:
        parts = [lib]
    # Some distributions keep the compiled part of the standard library in lib64.
    return tuple(str(part) for part in (executable, *sorted(parts), prefix / "lib64") if part.exists())


def readable_by_others(path: Path) -> bool:
    """Return whether an unprivileged user can start the file at the given path.

    If this process is root, the unprivileged user is a different user.
    """
    if os.geteuid() != 0:
        return os.access(path, os.R_OK | os.X_OK)
    folders = all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)
    return folders and bool(path.stat().st_mode & stat.S_IXOTH)


# -------- Sends files and a command to a prepared sandbox, through the pipe that becomes its standard input

_OPEN_FILES = 128
# The shell reads exactly the archive and the script; the rest of the pipe is the program's standard input.
UNPACK = f'read -r n m; head -c "$n" | tar -x -m -o -f - -C {WORK} && eval "$(head -c "$m")"'


def opening(
    files: Mapping[str, bytes], command: Sequence[str], limits: Limits, report: Sequence[str] = ()
) -> Opening:
    """Return the input of the waiting shell (two sizes, an archive and a script) and the greeting that the shell prints first."""
    greeting = f"kapelle {secrets.token_hex(8)}"
    bounded = " && ".join(kernel_limits(limits).values()) or ":"
    # The shell prints the greeting after it has set every limit, so a run without the greeting never began.
    script = f"{bounded} && echo {greeting} || exit 1\nset -- {shlex.join(command)}\n".encode()
    script += _reporting(report) if report else b'"$@"\nexit $?\n'
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    packed = buffer.getvalue()
    return Opening(f"{len(packed)} {len(script)}\n".encode() + packed + script, f"{greeting}\n".encode())


def _reporting(paths: Sequence[str]) -> bytes:
    """Return the end of a script that reports files and ensures that only the shell can write to the output of the script."""
    return f"""
"$@" >/dev/null 2>&1
n=0
while kill -9 -1 2>/dev/null && [ $n -lt 100 ]; do n=$((n+1)); sleep 0.01; done
for file in {shlex.join(paths)}; do
  if [ -f "$file" ] && [ ! -L "$file" ]; then head -c {REPORTED_BYTES} "$file" | base64 -w 0; fi
  echo
done
exit 0
""".encode()


def kernel_limits(limits: Limits) -> dict[str, str]:
    """Return a mapping from each resource that the kernel limits for each process to the shell command that sets the limit."""
    cpu_s = max(1, math.ceil(limits.cpu_s))
    # The shell that waits for the command counts as a process too. Shells use different letters for this limit.
    processes = limits.processes + 1
    address = limits.memory_bytes if limits.address_bytes is None else limits.address_bytes
    return {
        "address space": f"ulimit -v {max(1, address // 1024)}",
        "processes": f"{{ ulimit -u {processes} 2>/dev/null || ulimit -p {processes}; }}",
        # A program can ignore the soft limit; the hard limit kills it.
        "cpu": f"ulimit -S -t {cpu_s} && ulimit -H -t {cpu_s + 1}",
        "file size": f"ulimit -f {max(1, limits.file_bytes // 512)}",
        "descriptors": f"ulimit -n {_OPEN_FILES}",
        "locked memory": "ulimit -l 0",
    }


# -------- Starts programs without transparent huge pages: a partly mapped huge page stays allocated as a whole, and no sum
# includes its unmapped part
#
# Child processes inherit this setting, also across `execve` (prctl(2), PR_SET_THP_DISABLE), and no program between this process
# and the sandbox can set it. Therefore, this process disables huge pages for itself during a start. It does so only if the machine
# uses huge pages by default; the system call filter rejects explicit requests for huge pages.

_SETTING = Path("/sys/kernel/mm/transparent_hugepage")
_PR_SET_THP_DISABLE, _PR_GET_THP_DISABLE = 41, 42
_turn = threading.Lock()
_before: list[int] = []
"""The earlier setting of this process, stored once for each start in progress, because starts may overlap."""


@contextlib.contextmanager
def without_huge_pages() -> Iterator[None]:
    """Disable huge pages for programs that are started in this context."""
    if not given_unasked(_SETTING):
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    with _turn:
        _before.append(_before[0] if _before else int(prctl(_PR_GET_THP_DISABLE, 0, 0, 0, 0)))
        prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    try:
        yield
    finally:
        with _turn:
            before = _before.pop()
            if not _before:
                prctl(_PR_SET_THP_DISABLE, before, 0, 0, 0)


def given_unasked(setting: Path) -> bool:
    """Return whether the kernel settings in a folder enable huge pages of some size by default."""
    files = [setting / "enabled", *setting.glob("hugepages-*/enabled")]
    return any("[always]" in file.read_text() for file in files if file.is_file())


# -------- The processes of one pid namespace as a group: found, watched and killed through its process 1

LOOK_ANYWAY_S = 0.5
"""Time in seconds after which a run is measured again even if it has not used any CPU time."""
_FIRST_TO_GO = "1000"
"""The value of /proc/<pid>/oom_score_adj that makes the kernel kill a process first when the machine runs out of memory."""


class NamespaceGroup(ProcessGroup):
    """The processes of one pid namespace, identified by a descriptor of process 1 of the namespace."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        info_fd: int,
        mounts: tuple[str, ...],
        limits: Limits,
        cgroups: Path | None,
        *,
        tcp: bool = False,
    ) -> None:
        super().__init__(process)
        self._tcp = tcp
        self._limits = limits
        self._cgroups = cgroups
        self._cgroup: RunCgroup | None = None
        self._clock: int | None = None
        self._last: Usage | None = None
        self._counted_s: float | None = None
        self._looked_at = -math.inf
        self._info_fd: int | None = info_fd
        self._mounts = mounts
        self._init_pid = 0
        self._init_fd: int | None = None

    def usage(self) -> Usage | None:
        """Return the resource use of all processes of the namespace and of its tmpfs mounts.

        If process 1 has exited, the method returns the last measured resource use.
        """
        if not self._found(0.0) or self._init_fd is None:
            return None
        if self._cgroup is not None:
            files, _ = written_by(self._init_pid, self._mounts)
            # The kernel kills a process above the limit, so a measurement never exceeds the limit.
            memory = (
                self._limits.memory_bytes + 1
                if self._cgroup.ran_out_of_memory()
                else self._cgroup.memory_bytes()
            )
            locks = lock_bytes(self._init_pid, self._mounts)
            return Usage(self._cgroup.cpu_s(), memory, files, countable=locks is not None)
        cpu_s = None if self._clock is None else read_clock(self._clock)
        still = cpu_s is not None and cpu_s == self._counted_s
        if still and self._last is not None and time.monotonic() < self._looked_at + LOOK_ANYWAY_S:
            # No process of the run has used the CPU since the last measurement.
            return self._last
        if readable(self._init_fd, 0.0):
            # Process 1 has ended, and its process id may belong to another process by now.
            ended = self._last or Usage(0.0, 0, 0)
            return replace(ended, cpu_s=max(ended.cpu_s, cpu_s or 0.0))
        usage = usage_of(self._init_pid, self._mounts, self._limits.memory_bytes)
        if self._tcp:
            usage = replace(usage, memory_bytes=usage.memory_bytes + tcp_bytes(self._init_pid))
        if cpu_s is not None:
            # The first value includes time in the kernel, the second includes the time of children that were never waited for.
            usage = replace(usage, cpu_s=max(usage.cpu_s, cpu_s))
        self._last, self._counted_s, self._looked_at = usage, cpu_s, time.monotonic()
        return usage

    def waited_s(self) -> float:
        """Return the longest time in seconds that a thread of the run has waited for a CPU core."""
        return longest_wait_s(self._init_pid) if self._init_fd is not None else 0.0

    def kernel_s(self) -> tuple[float, float] | None:
        """Return the total CPU time of all processes and the part spent in the kernel, both in seconds.

        The result is None if a cgroup counts the resources, and before and after the run.
        """
        if self._cgroup is not None or self._init_fd is None:
            return None
        return times_of(self._init_pid)

    def begin(self, within_s: float) -> None:
        """Start to count CPU time (in a cgroup, all resources) before the program starts, while process 1 is the only process.

        After this call, the run is also killed first when the machine runs out of memory. Raises SandboxError if counting fails
        although this machine supports it.
        """
        if self._found(within_s):
            with contextlib.suppress(OSError):
                # A run can grow faster than it is measured. If memory runs out, the kernel must end the run and not this process.
                Path(f"/proc/{self._init_pid}/oom_score_adj").write_text(_FIRST_TO_GO)
            if self._cgroups is not None:
                self._cgroup = RunCgroup(self._cgroups, self._limits)
                for pid in (self._process.pid, self._init_pid):
                    self._cgroup.add(pid)
            elif task_clock_works():
                try:
                    self._clock = open_clock(self._init_pid)
                except ProcessLookupError:
                    pass
                except OSError as error:
                    raise SandboxError(
                        f"The CPU time of a sandbox cannot be counted: {error.strerror}."
                    ) from error
        # Reset the times of the devices, which every program can set, so that no later program can read them.
        for name in DEVICES:
            with contextlib.suppress(OSError):
                os.utime(name)

    def kill(self, within_s: float) -> None:
        """Kill process 1; the kernel then kills all other processes of the namespace."""
        if self._cgroup is not None:
            self._cgroup.kill()
        if self._found(within_s) and self._init_fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)
            readable(self._init_fd, within_s)
        else:
            # Only the session reaps this process, which happens later, so the process id is still valid.
            os.kill(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the descriptors and the cgroup of the run."""
        held = (self._info_fd, self._init_fd, self._clock)
        self._info_fd, self._init_fd, self._clock = None, None, None
        for fd in held:
            if fd is not None:
                os.close(fd)
        if self._cgroup is not None:
            self._cgroup.close()

    def _found(self, within_s: float) -> bool:
        """Read the id of process 1 from bubblewrap and return whether process 1 is known.

        Bubblewrap writes the id once and closes the pipe.
        """
        if self._info_fd is not None and readable(self._info_fd, within_s):
            text = b""
            while chunk := os.read(self._info_fd, 4096):
                text += chunk
            # The descriptor must be closed only once, because its number may later belong to another descriptor.
            info_fd, self._info_fd = self._info_fd, None
            os.close(info_fd)
            with contextlib.suppress(
                ValueError, KeyError, OSError
            ):  # the process has ended, or no descriptor is left
                pid = json.loads(text)["child-pid"]
                fd = os.pidfd_open(pid)
                # The process id could have been reused between bubblewrap's message and the line above.
                if parent_of(pid) == self._process.pid:
                    self._init_pid, self._init_fd = pid, fd
                else:
                    os.close(fd)
        return self._init_fd is not None


def readable(fd: int, within_s: float) -> bool:
    """Return whether a descriptor becomes readable, or its process exits, within `within_s` seconds."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


_OLDEST = (0, 8, 0)
"""The oldest version of bubblewrap with the options `--disable-userns` and `--size`."""
_COUNTS_BY_NAMESPACE = (5, 14)
"""The oldest version of Linux that counts processes separately for each user namespace."""
_FIRST_TRY = Limits(wall_s=20.0, cpu_s=20.0)
_LOOK = "readlink /proc/self/ns/user /proc/self/ns/mnt /proc/self/ns/pid /proc/self/ns/net; id -u; env"


class PreparedShell:
    """A sandbox without a program.

    Its namespaces and mounts already exist, and its shell waits for an archive with the files (`UNPACK`).
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        group: ProcessGroup,
        limits: Limits,
        report: Sequence[str] = (),
    ) -> None:
        self._process, self._group, self._limits = process, group, limits
        self._report = report
        self._used = False

    def start(self, files: Mapping[str, bytes], command: Sequence[str]) -> Session:
        """Copy the files into the work directory and start the command there; the wall-clock time of the run starts with this call."""
        assert not self._used, "a prepared sandbox is used once"
        check_files(files, self._limits)
        self._group.begin(BEGIN_WITHIN_S)
        self._used = True
        begin = opening(files, command, self._limits, self._report)
        return Session(self._process, self._group, self._limits, begin)

    def discard(self) -> None:
        """Free an unused sandbox; after `start`, this method does nothing."""
        if not self._used:
            self._used = True
            Session(self._process, self._group, self._limits).finish(kill=True)


class Bubblewrap:
    """The sandbox backend `bubblewrap`, which is the default and works on Linux as root and as an ordinary user."""

    name = "bubblewrap"

    def __init__(self, layout: Layout = _PLAIN_LAYOUT) -> None:
        """Set the contents of the sandboxes to `layout`."""
        self._layout = layout

    @property
    def python(self) -> str:
        """The path of a Python interpreter that an unprivileged user can reach."""
        return reachable_interpreter().path

    def layers(self) -> tuple[Layer, ...]:
        """Start a test sandbox and return the layers of protection that this machine provides."""
        return _layers()

    def prepare(self, limits: Limits) -> PreparedShell:
        """Start a sandbox that waits for its files and command.

        Raises SandboxError if bubblewrap or a required layer is missing.
        """
        missing = [layer for layer in self.layers() if layer.required and not layer.present]
        if missing:
            raise SandboxError(
                f"The sandbox lacks the required layer '{missing[0].name}': {missing[0].detail}"
            )
        return _prepare(limits, self._layout)


def _prepare(limits: Limits, layout: Layout = _PLAIN_LAYOUT) -> PreparedShell:
    """Start a sandbox even if this machine lacks a layer of protection."""
    interpreter, folder = reachable_interpreter(), strong_or_why_not()
    strong = folder if isinstance(folder, Path) else None
    counted = strong is not None or task_clock_works()
    program = (
        filter_program(children_counted=counted, loopback=True)
        if layout.loopback
        else filter_program(children_counted=counted)
    )
    # Kernel limits for which the shell has no letter or only large units. Core dumps are limited to one byte, because with 0 a
    # crash would still start the host's core handler, if there is one (core(5)).
    wanted = {"core": (resource.RLIMIT_CORE, 1), "sigpending": (resource.RLIMIT_SIGPENDING, _SIGNALS)}
    lowered = [
        f"--{name}={most}:{most}"
        for name, (kind, most) in wanted.items()
        if not 0 <= resource.getrlimit(kind)[1] < most
    ]
    filter_fd: int | None = None
    info_read, info_write = os.pipe()
    inherited = [info_write]
    held: list[tuple[str, int]] = []
    try:
        for path, content in layout.files:
            fd = os.memfd_create("kapelle", os.MFD_CLOEXEC)
            inherited.append(fd)
            held.append((path, fd))
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(content)
            os.lseek(fd, 0, os.SEEK_SET)
        if program is not None:
            filter_fd = os.memfd_create("kapelle", os.MFD_CLOEXEC)
            inherited.append(filter_fd)
            os.write(filter_fd, program)
            os.lseek(filter_fd, 0, os.SEEK_SET)
        with without_huge_pages():
            process = subprocess.Popen(
                [
                    *((require("prlimit", "util-linux"), *lowered, "--") if lowered else ()),
                    *drop_privileges(),
                    require("bwrap", "bubblewrap"),
                    *arguments(limits, interpreter, info_write, filter_fd, layout, held),
                    *("--", "/bin/sh", "-c", UNPACK),
                ],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
                pass_fds=inherited,
            )
    except BaseException:
        os.close(info_read)
        raise
    finally:
        for fd in inherited:
            os.close(fd)
    group = NamespaceGroup(
        process, info_read, (WORK, SHARED_MEMORY, *layout.folders), limits, strong, tcp=layout.loopback
    )
    return PreparedShell(process, group, limits, layout.report)


@functools.cache
def _layers() -> tuple[Layer, ...]:
    """Start a test sandbox and compare its view of the system with that of this process; return the layers of protection."""
    try:
        text = subprocess.run(
            [require("bwrap", "bubblewrap"), "--version"], capture_output=True, text=True, check=False
        ).stdout
        found = tuple(map(int, re.findall(r"[0-9]+", text)))
        if found < _OLDEST:
            wanted = ".".join(map(str, _OLDEST))
            raise SandboxError(f"{text.strip() or 'bubblewrap'} is too old. Install {wanted} or newer.")
        result = _prepare(_FIRST_TRY).start({}, ["/bin/sh", "-c", _LOOK]).finish()
        if not result.ok:
            raise SandboxError(
                f"bubblewrap cannot create a sandbox on this machine: {result.stderr.decode(errors='replace').strip()[:400]} "
                "Allow unprivileged user namespaces (see `sysctl kernel.unprivileged_userns_clone "
                "user.max_user_namespaces kernel.apparmor_restrict_unprivileged_userns`). Start a container with "
                "--security-opt seccomp=unconfined, or with another profile that allows them."
            )
        seen = result.stdout.decode(errors="replace").splitlines()
    except SandboxError as error:
        return (Layer("bubblewrap", required=True, present=False, detail=str(error)),)
    root = os.geteuid() == 0
    # The limits of a run as a whole.
    folder = strong_or_why_not()
    strong = isinstance(folder, Path)
    mode = "strong: the kernel limits the memory and processes of a run as a whole"
    if not strong:
        clock = (
            "and a clock counts its CPU time"
            if task_clock_works()
            else "and programs cannot change SIGCHLD (no perf_event_open)"
        )
        mode = f"weak: the supervisor adds up the resource use of a run every 20 ms, {clock}"
    known = filter_program() is not None
    inner = seen[:4]
    outer = [str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("user", "mnt", "pid", "net")]
    own = [f"{name} namespace" for name in ("user", "mount", "pid", "network")]
    leaked = sorted({line.partition("=")[0] for line in seen[5:]} - _EXPECTED_VARIABLES)
    return (
        *(
            Layer(
                name,
                True,
                a != b,
                "separate" if a != b else "the sandbox shares the namespace of this process",
            )
            for name, a, b in zip(own, inner, outer, strict=True)
        ),
        Layer("unprivileged user", True, seen[4] != "0", f"the program runs as user {seen[4]}"),
        Layer(
            "cleared environment",
            True,
            not leaked,
            f"leaked: {', '.join(leaked)}" if leaked else "nothing inherited",
        ),
        _process_limit(root),
        Layer(
            "wall time, output bound, group kill", True, True, "enforced by the supervisor, through a pidfd"
        ),
        Layer(
            "seccomp",
            False,
            known,
            "denies system calls that honest programs never need"
            if known
            else f"no table of system calls for {os.uname().machine}",
        ),
        Layer(
            "user id per run",
            False,
            root,
            "a random id for each run"
            if root
            else "every run has the id of the user who started kapelle, mapped to 1000",
        ),
        Layer("cgroups", False, strong, f"one cgroup for each run, in {folder}" if strong else str(folder)),
        Layer("mode", False, True, mode),
    )


def _process_limit(root: bool) -> Layer:
    release = tuple(map(int, re.findall(r"[0-9]+", os.uname().release)[:2]))
    if root or release >= _COUNTS_BY_NAMESPACE:
        return Layer("process limit", True, True, "counts the processes of one sandbox")
    wanted = ".".join(map(str, _COUNTS_BY_NAMESPACE))
    detail = (
        f"before Linux {wanted}, the limit counts all processes of an ordinary user; run as root, or upgrade"
    )
    return Layer("process limit", True, False, detail)


_EXPECTED_VARIABLES = {*ENVIRONMENT, "PWD", "OLDPWD", "SHLVL", "_"}
