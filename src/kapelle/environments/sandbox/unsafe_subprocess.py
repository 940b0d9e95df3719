"""Run programs as ordinary child processes without containment; use this backend only for code that you would run by hand.

This backend must be selected by name and issues a warning. Wall-clock time and output are limited and the process group is
killed. These measures stop programs with unintentional mistakes. A hostile program can read, write and send everything that its
user can, and can leave its process group.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from kapelle.environments.sandbox.contract import Layer, Limits, check_files
from kapelle.environments.sandbox.session import ProcessGroup, Session
from kapelle.environments.sandbox.usage import longest_wait_s


class UnsafeSandboxWarning(UserWarning):
    """A warning that programs run without containment."""


class UnsafeSubprocess:
    """The sandbox backend `unsafe_subprocess`."""

    name = "unsafe_subprocess"

    @property
    def python(self) -> str:
        """The Python interpreter of the current process."""
        return sys.executable

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers of protection: limits on time and output, and a process group, which a program can leave."""
        return (
            Layer("wall time, output bound", True, True, "enforced by the supervisor"),
            Layer("group kill", True, True, "kills the process group, which a program can leave"),
            *(
                Layer(f"{name} namespace", False, False, "none in this backend")
                for name in ("user", "mount", "pid", "network")
            ),
        )

    def prepare(self, limits: Limits) -> PreparedSubprocess:
        """Create a work directory and issue a warning."""
        warnings.warn(
            "The sandbox `unsafe_subprocess` contains nothing: programs run with your permissions. Use `bubblewrap`.",
            UnsafeSandboxWarning,
            stacklevel=2,
        )
        return PreparedSubprocess(limits)


class PreparedSubprocess:
    """A temporary work directory on the host."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._work = Path(tempfile.mkdtemp(prefix="kapelle-"))
        self._used = False

    def start(self, files: Mapping[str, bytes], command: Sequence[str]) -> Session:
        """Write the files and start the command in a separate process group."""
        check_files(files, self._limits)
        for path, content in files.items():
            target = self._work / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        # A shell sets the limits that every POSIX shell supports, and then replaces itself with the command.
        blocks, seconds = max(1, self._limits.file_bytes // 512), max(1, int(self._limits.cpu_s + 0.999))
        bounded = f"ulimit -c 0; ulimit -S -t {seconds}; ulimit -H -t {seconds + 1}; ulimit -f {blocks}"
        process = subprocess.Popen(
            ["/bin/sh", "-c", f'{bounded}; exec "$@"', "sh", *command],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._work,
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                "HOME": str(self._work),
                "LANG": "C.UTF-8",
                "PYTHONHASHSEED": "0",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            start_new_session=True,
        )
        self._used = True
        return Session(process, UnsafeProcessGroup(process, self._work), self._limits)

    def discard(self) -> None:
        """Remove the work directory; after `start`, this method does nothing."""
        if not self._used:
            shutil.rmtree(self._work, ignore_errors=True)


class UnsafeProcessGroup(ProcessGroup):
    """A process group and its work directory.

    The resource use of these processes is not measured, because they cannot be distinguished from other processes of the host.
    """

    def __init__(self, process: subprocess.Popen[bytes], work: Path) -> None:
        super().__init__(process)
        self._work = work

    def waited_s(self) -> float:
        """Return the longest time in seconds that a thread of the run has waited for a CPU core."""
        return longest_wait_s(self._process.pid)

    def kill(self, within_s: float) -> None:
        """Kill the process group.

        The leader of the group is reaped later, so its process id is still valid.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Remove the work directory of the run."""
        shutil.rmtree(self._work, ignore_errors=True)
