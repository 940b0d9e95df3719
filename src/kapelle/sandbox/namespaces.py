"""The processes of one pid namespace as a group: found, watched and killed through its process 1."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from kapelle.errors import SandboxError
from kapelle.sandbox.cgroups import RunCgroup
from kapelle.sandbox.contract import Limits
from kapelle.sandbox.task_clock import open_clock, read_clock
from kapelle.sandbox.task_clock import works_here as task_clock_works
from kapelle.sandbox.usage import Usage, lock_bytes, longest_wait_s, parent_of, times_of, usage_of, written_by

LOOK_ANYWAY_S = 0.5
"""How long a run whose clock stands still is taken to do nothing."""
_FIRST_TO_GO = "1000"
"""Of /proc/<pid>/oom_score_adj: whom the kernel ends first when the machine runs out of memory."""


class NamespaceGroup:
    """All processes of one pid namespace, held by a descriptor of its process 1."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        info_fd: int,
        mounts: tuple[str, ...],
        limits: Limits,
        cgroups: Path | None,
    ) -> None:
        self._process = process
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
        """Return what all processes of the namespace and its tmpfs mounts use now, or used at their end."""
        if not self._found(0.0) or self._init_fd is None:
            return None
        if self._cgroup is not None:
            return self._usage_of(self._cgroup)
        cpu_s = None if self._clock is None else read_clock(self._clock)
        still = cpu_s is not None and cpu_s == self._counted_s
        if still and self._last is not None and time.monotonic() < self._looked_at + LOOK_ANYWAY_S:
            # Nothing of it ran since the last look.
            return self._last
        if readable(self._init_fd, 0.0):
            # Its number may be another process's by now.
            ended = self._last or Usage(0.0, 0, 0)
            return replace(ended, cpu_s=max(ended.cpu_s, cpu_s or 0.0))
        usage = usage_of(self._init_pid, self._mounts, self._limits.memory_bytes)
        if cpu_s is not None:
            # Time in the kernel is in the one, time of children that nobody waited for in the other.
            usage = replace(usage, cpu_s=max(usage.cpu_s, cpu_s))
        self._last, self._counted_s, self._looked_at = usage, cpu_s, time.monotonic()
        return usage

    def waited_s(self) -> float:
        """Return for how long a thread of the run has waited for a core, at most."""
        return longest_wait_s(self._init_pid) if self._init_fd is not None else 0.0

    def kernel_s(self) -> tuple[float, float] | None:
        """Return the seconds of CPU of all processes and of those the ones in the kernel; None in a cgroup, or before and after."""
        if self._cgroup is not None or self._init_fd is None:
            return None
        return times_of(self._init_pid)

    def _usage_of(self, cgroup: RunCgroup) -> Usage:
        files, _ = written_by(self._init_pid, self._mounts)
        # The kernel has ended what went above its limit: no look can see more than that.
        memory = self._limits.memory_bytes + 1 if cgroup.ran_out_of_memory() else cgroup.memory_bytes()
        locks = lock_bytes(self._init_pid, self._mounts)
        return Usage(cgroup.cpu_s(), memory, files, countable=locks is not None)

    def count(self, within_s: float) -> None:
        """Count CPU time, or all use, from here on: before the program starts, while process 1 is alone.

        From here on it is also the first to end when the machine runs out of memory.

        Raises SandboxError when that fails although this machine can.
        """
        if not self._found(within_s):
            return
        with contextlib.suppress(OSError):
            # A run can grow faster than it is looked at; where the machine has no room for that, it ends, not this process.
            Path(f"/proc/{self._init_pid}/oom_score_adj").write_text(_FIRST_TO_GO)
        if self._cgroups is not None:
            self._cgroup = RunCgroup(self._cgroups, self._limits)
            for pid in (self._process.pid, self._init_pid):
                self._cgroup.add(pid)
        elif task_clock_works():
            try:
                self._clock = open_clock(self._init_pid)
            except ProcessLookupError:
                return
            except OSError as error:
                raise SandboxError(
                    f"The CPU time of a sandbox cannot be counted: {error.strerror}."
                ) from error

    def kill(self, within_s: float) -> None:
        """Kill process 1: the kernel takes every other process of the namespace with it."""
        if self._cgroup is not None:
            self._cgroup.kill()
        if self._found(within_s) and self._init_fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)
            readable(self._init_fd, within_s)
        else:
            # It is reaped by its session alone, later: the number is still its own.
            os.kill(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the descriptors."""
        held = (self._info_fd, self._init_fd, self._clock)
        self._info_fd, self._init_fd, self._clock = None, None, None
        for fd in held:
            if fd is not None:
                os.close(fd)
        if self._cgroup is not None:
            self._cgroup.close()

    def _found(self, within_s: float) -> bool:
        """Learn process 1 from bubblewrap, which writes it once and closes the pipe."""
        if self._info_fd is not None and readable(self._info_fd, within_s):
            text = b""
            while chunk := os.read(self._info_fd, 4096):
                text += chunk
            # Closed once, whatever comes after: by then the number may be another descriptor's.
            info_fd, self._info_fd = self._info_fd, None
            os.close(info_fd)
            with contextlib.suppress(ValueError, KeyError, OSError):  # gone already, or no descriptor left
                pid = json.loads(text)["child-pid"]
                fd = os.pidfd_open(pid)
                # Between bubblewrap's message and the line above the number could have been reused.
                if parent_of(pid) == self._process.pid:
                    self._init_pid, self._init_fd = pid, fd
                else:
                    os.close(fd)
        return self._init_fd is not None


def readable(fd: int, within_s: float) -> bool:
    """Return whether a descriptor has something to read, or a process behind it has ended, in time."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
