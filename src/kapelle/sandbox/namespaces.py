"""The processes of one pid namespace as a group: found, watched and killed through its process 1."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from dataclasses import replace

from kapelle.errors import SandboxError
from kapelle.sandbox.contract import Limits
from kapelle.sandbox.task_clock import open_clock, read_clock
from kapelle.sandbox.task_clock import works_here as task_clock_works
from kapelle.sandbox.usage import Usage, parent_of, usage_of


class NamespaceGroup:
    """All processes of one pid namespace, held by a descriptor of its process 1."""

    def __init__(
        self, process: subprocess.Popen[bytes], info_fd: int, mounts: tuple[str, ...], limits: Limits
    ) -> None:
        self._process = process
        self._memory_limit = limits.memory_bytes
        self._clock: int | None = None
        self._last: Usage | None = None
        self._counted_s: float | None = None
        self._info_fd: int | None = info_fd
        self._mounts = mounts
        self._init_pid = 0
        self._init_fd: int | None = None

    def usage(self) -> Usage | None:
        """Return what all processes of the namespace and its tmpfs mounts use now."""
        if not self._found(0.0):
            return None
        cpu_s = None if self._clock is None else read_clock(self._clock)
        if self._last is not None and cpu_s is not None and cpu_s == self._counted_s:
            # Nothing of it ran since the last look.
            return self._last
        usage = usage_of(self._init_pid, self._mounts, self._memory_limit)
        if cpu_s is not None:
            # Time in the kernel is in the one, time of children that nobody waited for in the other.
            usage = replace(usage, cpu_s=max(usage.cpu_s, cpu_s))
        self._last, self._counted_s = usage, cpu_s
        return usage

    def count(self, within_s: float) -> None:
        """Count CPU time from here on: before the program starts, while process 1 is alone.

        Raises SandboxError when that fails although this machine can.
        """
        if task_clock_works() and self._found(within_s):
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
        self._info_fd = self._init_fd = self._clock = None
        for fd in held:
            if fd is not None:
                os.close(fd)

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
