"""The cgroup of one run: the kernel bounds its memory and processes as a whole, counts its CPU, and kills all of it.

This needs cgroup v2 and a folder of it that this process may use: one that systemd has delegated
(`systemd-run --user --scope --property=Delegate=yes kapelle train …`), or one with `memory` and `pids` in its
`cgroup.subtree_control` in whose child `kapelle` this process is. It is the strong mode; `usage` is the other one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from pathlib import Path

from kapelle.errors import SandboxError
from kapelle.sandbox.contract import Limits

LEAF = "kapelle"
"""Where this process itself stands: a cgroup with processes may not pass controllers on."""
_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_CONTROLLERS = ("memory", "pids")
_RUN = "run-"
_OVERHEAD = 4
"""Processes beside the program's: bubblewrap, and the shell that waits for it."""
_GONE_WITHIN_S = 0.4


class RunCgroup:
    """The cgroup of one run."""

    def __init__(self, parent: Path, limits: Limits) -> None:
        """Make it, empty. Raises SandboxError when the kernel refuses."""
        self._folder = parent / f"{_RUN}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            self._folder.mkdir()
            self._write("memory.max", limits.memory_bytes)
            self._write("memory.oom.group", 1)
            self._write("pids.max", limits.processes + _OVERHEAD)
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap accounting
                self._write("memory.swap.max", 0)
        except OSError as error:
            self.close()
            raise SandboxError(f"No cgroup can be made in {parent}: {error.strerror}.") from error

    def add(self, pid: int) -> None:
        """Move a process into it; what that starts from then on is in it too. Raises SandboxError."""
        try:
            self._write("cgroup.procs", pid)
        except OSError as error:
            raise SandboxError(f"A sandbox cannot be moved to {self._folder}: {error.strerror}.") from error

    def cpu_s(self) -> float:
        """Return the seconds of CPU of all that ever ran in it."""
        return self._numbers("cpu.stat").get("usage_usec", 0) / 1e6

    def memory_bytes(self) -> int:
        """Return what it holds and the kernel could not drop: everything but pages of files that are also on disk."""
        held = self._numbers("memory.stat")
        return int((self._folder / "memory.current").read_text()) - held.get("file", 0) + held.get("shmem", 0)

    def ran_out_of_memory(self) -> bool:
        """Return whether the kernel has killed in it because it was full."""
        return self._numbers("memory.events").get("oom_kill", 0) > 0

    def kill(self) -> None:
        """Kill everything in it at once."""
        with contextlib.suppress(OSError):
            self._write("cgroup.kill", 1)

    def close(self) -> None:
        """Remove it, once the dead are gone from it; where they take long, the next one to be closed removes it."""
        until = time.monotonic() + _GONE_WITHIN_S
        _left.add(self._folder)
        while True:
            for folder in tuple(_left):
                with contextlib.suppress(OSError):  # the dead are still there
                    with contextlib.suppress(FileNotFoundError):
                        folder.rmdir()
                    _left.discard(folder)
            if self._folder not in _left or time.monotonic() > until:
                return
            self.kill()
            time.sleep(0.005)

    def _write(self, name: str, value: int) -> None:
        # Not created: a file that the kernel does not offer must not look like one that it took.
        with (self._folder / name).open("r+") as file:
            file.write(str(value))

    def _numbers(self, name: str) -> dict[str, int]:
        rows = (line.split() for line in (self._folder / name).read_text().splitlines())
        return {row[0]: int(row[1]) for row in rows if len(row) == 2}


_left: set[Path] = set()
"""Cgroups of runs that have ended, whose dead were still there."""


@functools.cache
def strong_or_why_not() -> Path | str:
    """Return the folder in which cgroups of runs can be made, or the reason that there is none."""
    try:
        return find_folder(_ROOT, _OWN)
    except SandboxError as error:
        return str(error)


def find_folder(root: Path, own: Path) -> Path:
    """Return the folder in which cgroups of runs can be made, for a file system and a file like /proc/self/cgroup.

    Raises SandboxError with the reason that there is none.
    """
    paths = [line.removeprefix("0::/") for line in own.read_text().splitlines() if line.startswith("0::/")]
    if not paths or not (root / "cgroup.controllers").is_file():
        raise SandboxError("cgroup v2 is not mounted as the one hierarchy")
    here = root / paths[0]
    folder = here.parent if here.name == LEAF else here
    missing = [
        name for name in _CONTROLLERS if name not in (folder / "cgroup.controllers").read_text().split()
    ]
    if missing:
        raise SandboxError(f"{folder} has no controller {' and '.join(missing)}")
    if not os.access(folder, os.W_OK):
        raise SandboxError(f"{folder} is not delegated to this user")
    if here == folder and not _is_delegated(folder):
        raise SandboxError(
            f"{folder} is not delegated; start with `systemd-run --user --scope --property=Delegate=yes`"
        )
    try:
        if here == folder:
            # A cgroup with processes passes no controllers on: they move into its child `kapelle`.
            (folder / LEAF).mkdir(exist_ok=True)
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (folder / LEAF / "cgroup.procs").write_text(pid)
        control = folder / "cgroup.subtree_control"
        not_yet = [name for name in _CONTROLLERS if name not in control.read_text().split()]
        if not_yet:
            control.write_text(" ".join(f"+{name}" for name in not_yet))
    except OSError as error:
        raise SandboxError(f"{folder} passes no controllers on: {error.strerror}") from error
    if not (folder / LEAF / "cgroup.kill").is_file():
        raise SandboxError("this kernel has no cgroup.kill; Linux 5.14 has")
    # Remove the cgroups of runs whose trainer was killed; the kernel keeps one in which something
    # lives.
    for left in folder.glob(f"{_RUN}*"):
        if not Path("/proc", left.name.removeprefix(_RUN).partition("-")[0]).exists():
            with contextlib.suppress(OSError):
                left.rmdir()
    return folder


def _is_delegated(folder: Path) -> bool:
    """Return whether systemd has marked a cgroup as one that its processes may divide."""
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False
