"""Supervises one run: moves bytes both ways within bounds, watches its use, ends all of it as a group.

Works the same for every backend; how a group is watched and killed is the backend's `ProcessGroup`.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kapelle.errors import SandboxError
from kapelle.runtime.awake import AwakeClock
from kapelle.sandbox.contract import LimitName, Limits, Result
from kapelle.sandbox.machine import came_back, unattributed_bytes
from kapelle.sandbox.usage import Usage
from kapelle.sandbox.watching import forget, watch

WATCH_EVERY_S = 0.02
"""How far a run can get between two looks at what it uses."""
WATCH_CLOSELY_S = 0.004
"""The same for one that grows so fast that it would be above its memory by then."""
BEGIN_WITHIN_S = 30.0
"""How long a sandbox may take to unpack before the program's own clock begins."""
LEAST_GRANTED_S = 0.05
"""Fewer seconds of waiting for a core are not given back: every program waits a little."""
KILL_WITHIN_S = 0.4
"""How long the dead are waited for after a kill before the supervisor goes on without them."""
_CHUNK = 65536


class ProcessGroup(Protocol):
    """All processes of one run, as the backend knows them."""

    def usage(self) -> Usage | None:
        """Return what they use now, None where that cannot be seen."""
        ...

    def waited_s(self) -> float:
        """Return for how long one of their threads has waited for a core, at most; 0 where that cannot be seen."""
        ...

    def kernel_s(self) -> tuple[float, float] | None:
        """Return their seconds of CPU and of those the ones in the kernel; None where a cgroup counts all that they hold."""
        ...

    def kill(self, within_s: float) -> None:
        """Kill all of them and wait until they are gone; may be called again."""
        ...

    def close(self) -> None:
        """Free what the backend holds for the run: descriptors, directories, names."""
        ...


@dataclass(frozen=True, slots=True)
class Opening:
    """What passes before the program starts."""

    message: bytes
    """What the waiting sandbox reads first."""
    greeting: bytes
    """What it writes on standard output when everything stands and the program is next; no output before it
    is a program's, and a run without it never began."""


class ProcessSession:
    """A run whose program reads from and writes to pipes of a child process."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        group: ProcessGroup,
        limits: Limits,
        opening: Opening | None = None,
    ) -> None:
        assert process.stdin is not None, "all three are pipes"
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._group = group
        self._limits = limits
        opening = opening or Opening(b"", b"")
        self._input = bytearray(opening.message)
        self._greeting = opening.greeting
        self._waiting = bool(opening.greeting)
        self._stdin = process.stdin.fileno()
        self._output = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        self._stdout, self._stderr = self._output
        self._taken = 0
        self._open = set(self._output)
        self._input_open, self._input_ends = True, False
        self._limit: LimitName | None = None
        self._memory, self._peak_memory, self._seen_cpu_s = 0, 0, 0.0
        self._granted_s = 0.0
        # Counts what passes while the program is waited for, and nothing while this process is stopped.
        self._clock = AwakeClock()
        self._started = self._clock.now()
        self._looked = self._started
        self._next_watch = self._started + WATCH_EVERY_S
        self._exit_fd = _exit_of(process, group)
        self._ended = False
        self._suspected, self._lost_by_others = False, False
        self._result: Result | None = None
        for fd in (self._stdin, *self._output):
            os.set_blocking(fd, False)
        self._turn = threading.RLock()
        watch(self)

    @property
    def ended(self) -> bool:
        """Whether the program was seen to have ended by itself."""
        return self._ended

    @property
    def unexplained_bytes(self) -> int:
        """What the machine may miss before the run is ended for it."""
        return self._limits.unexplained_bytes

    def kernel_s(self) -> tuple[float, float] | None:
        """Return its seconds of CPU and of those the ones in the kernel, None before its program begins."""
        return None if self._waiting else self._group.kernel_s()

    def suspect(self) -> None:
        """End the run at its next look: the machine misses memory, and most by this run."""
        self._suspected = True

    def send(self, data: bytes) -> None:
        """Write to the program's standard input; what a dead program does not read is dropped."""
        with self._turn:
            self._input += data
            self._pump(lambda: not self._input, math.inf)
            self._check_begun()

    def look(self) -> None:
        """End the run if it is above its limits; nothing while a call is under way, which looks by itself."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self._result is None and not self._ended and self._limit is None:
                if self._waiting:
                    self._move(0.0)
                if self._is_above_a_limit():
                    self._kill()
        finally:
            self._turn.release()

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next line of standard output without its end, None when none can come in time."""
        output = self._output[self._stdout]
        with self._turn:
            self._pump(lambda: not self._waiting, math.inf)
            self._check_begun()
            self._pump(lambda: output.find(b"\n", self._taken) >= 0, self._clock.now() + timeout_s)
            end = output.find(b"\n", self._taken)
            if end < 0:
                return None
            line = bytes(output[self._taken : end])
            self._taken = end + 1
            return line

    def finish(self, *, kill: bool = False) -> Result:
        """Close the input, wait for the end within the limits (or bring it about) and free everything.

        May be called again, and then returns the same.
        """
        with self._turn:
            return self._finish(kill=kill)

    def _finish(self, *, kill: bool) -> Result:
        if self._result is not None:
            self._check_own_fault()
            return self._result
        try:
            self._input_ends = True
            if not kill:
                self._pump(lambda: False, math.inf)
            self._kill()
            self._drain()
            self._result = self._reap()
            if not kill:
                self._check_begun()
            self._check_own_fault()
            return self._result
        finally:
            self._close()

    def _kill(self) -> None:
        """Kill all of the run. Of one that was suspected, see whether the machine has its memory back then."""
        suspected, self._suspected = self._suspected and self._limit == "memory", False
        held = unattributed_bytes() if suspected else None
        self._group.kill(KILL_WITHIN_S)
        if held is not None:
            self._lost_by_others = not came_back(held, self._limits.unexplained_bytes // 2)

    def _check_own_fault(self) -> None:
        """Raise SandboxError for a run that was ended for what others have taken: that is no fault of the program."""
        if self._lost_by_others:
            raise SandboxError(
                f"The machine lost more than {self._limits.unexplained_bytes:,} bytes of memory to its kernel while a program "
                "ran in a sandbox. The program was ended and they did not come back, so something else took them: look at "
                "Slab and VmallocUsed in /proc/meminfo, or raise `unexplained_bytes` of the sandbox's limits."
            )

    @property
    def _deadline(self) -> float:
        return self._started + (BEGIN_WITHIN_S if self._waiting else self._limits.wall_s + self._granted_s)

    def _check_begun(self) -> None:
        """Raise SandboxError for a run that is over before its program began: that is no fault of the program."""
        if self._waiting and (self._ended or self._limit is not None):
            result = self.finish(kill=True)
            late = (
                f"it was not ready within {BEGIN_WITHIN_S:g} s; this machine may be short of memory or time"
            )
            why = late if self._limit == "wall" else "no reason was given"
            said = result.stderr.decode(errors="replace").strip()[-400:]
            raise SandboxError(f"The sandbox could not start the program: {said or why}.")

    def _pump(self, done: Callable[[], bool], until: float) -> None:
        """Move bytes until `done`, the end of the program, a limit, or a moment, later by what is granted meanwhile."""
        before = self._granted_s
        while not done() and not self._ended and self._limit is None:
            now = self._clock.now()
            stop = min(until + self._granted_s - before, self._deadline)
            if now >= stop and not self._grant():
                if now >= self._deadline:
                    self._limit = "wall"
                return
            self._watch(now)
            self._move(max(min(stop, self._next_watch) - now, 0.0))

    def _grant(self) -> bool:
        """Give back the seconds in which the machine had no core for the program; return whether there were any."""
        if self._waiting or not self._limits.patience:
            return False
        most_s = self._limits.wall_s * self._limits.patience
        more_s = min(self._group.waited_s(), most_s) - self._granted_s
        if more_s < LEAST_GRANTED_S:
            return False
        self._granted_s += more_s
        return True

    def _move(self, wait_s: float) -> None:
        poll = select.poll()
        for fd in self._open:
            poll.register(fd, select.POLLIN)
        if self._input and self._input_open:
            poll.register(self._stdin, select.POLLOUT)
        elif self._input_ends:
            self._close_input()
        if self._exit_fd is not None:
            poll.register(self._exit_fd, select.POLLIN)
        elif os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            self._end()
            return
        for fd, _ in poll.poll(wait_s * 1000):
            if fd == self._stdin:
                self._write()
            elif fd == self._exit_fd:
                self._end()
            else:
                self._read(fd)

    def _end(self) -> None:
        self._ended = True
        # What it wrote before it ended may have come after the last look at the pipes, and what it used after the
        # last look at that.
        self._drain()
        if self._limit is None:
            self._is_above_a_limit()

    def _write(self) -> None:
        try:
            del self._input[: os.write(self._stdin, self._input[:_CHUNK])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._input.clear()
            self._close_input()

    def _close_input(self) -> None:
        if self._input_open:
            self._input_open = False
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _read(self, fd: int) -> bool:
        """Take what is there now; return whether there was anything. Output beyond the limit is dropped."""
        room = self._limits.output_bytes + len(self._greeting) - sum(map(len, self._output.values()))
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._open.discard(fd)
        elif len(data) > room and self._limit is None:
            self._limit = "output"
        self._output[fd] += data[: max(room, 0)]
        if self._waiting and self._output[self._stdout].startswith(self._greeting):
            self._waiting = False
            self._taken = len(self._greeting)
            self._started = self._clock.now()
        return bool(data)

    def _drain(self) -> None:
        """Take what the dead left in the pipes: at most what the pipes hold, as nobody writes any more."""
        for fd in tuple(self._open):
            while self._read(fd) and self._limit != "output":
                pass

    def _watch(self, now: float) -> None:
        if now < self._next_watch:
            return
        before = self._memory
        self._is_above_a_limit()
        room = self._limits.memory_bytes - self._memory
        self._next_watch = now + look_again_s(self._memory - before, now - self._looked, room)
        self._looked = now

    def _is_above_a_limit(self) -> bool:
        """Look at what the run uses and keep in mind the limit that it is above."""
        if self._suspected:
            self._limit = "memory"
            return True
        # Before the greeting the mounts may still be the host's, and what is used is not the program's.
        usage = None if self._waiting else self._group.usage()
        if usage is None:
            return False
        self._memory = usage.memory_bytes
        self._peak_memory = max(self._peak_memory, self._memory)
        self._seen_cpu_s = max(self._seen_cpu_s, usage.cpu_s)
        if usage.memory_bytes > self._limits.memory_bytes or not usage.countable:
            self._limit = "memory"
        elif usage.files > self._limits.files:
            self._limit = "files"
        elif usage.cpu_s > self._limits.cpu_s:
            self._limit = "cpu"
        else:
            return False
        return True

    def _reap(self) -> Result:
        wall_s = self._clock.now() - self._started
        status, cpu_s = _wait(self._process, KILL_WITHIN_S)
        cpu_s = max(cpu_s, self._seen_cpu_s)
        by_signal = (
            None if status is None else -status if status < 0 else status - 128 if status > 128 else None
        )
        if self._limit is None and (cpu_s > self._limits.cpu_s or by_signal == signal.SIGXCPU):
            self._limit = "cpu"
        return Result(
            stdout=bytes(self._output[self._stdout][0 if self._waiting else len(self._greeting) :]),
            stderr=bytes(self._output[self._stderr]),
            exit_code=None if self._limit or by_signal is not None else status,
            signal=None if self._limit else by_signal,
            limit=self._limit,
            wall_s=wall_s,
            cpu_s=cpu_s,
            peak_memory_bytes=self._peak_memory,
        )

    def _close(self) -> None:
        forget(self)
        self._close_input()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        if self._exit_fd is not None:
            os.close(self._exit_fd)
            self._exit_fd = None
        self._group.close()


def look_again_s(grown: int, in_s: float, room: int) -> float:
    """Return when to look again at a run that has grown by some bytes in some seconds and may grow by `room` more.

    One that would be full by the next look, if it grew twice as fast, is looked at twice before that.
    """
    full_s = math.inf if grown <= 0 else room * in_s / grown
    return WATCH_EVERY_S if full_s > 2 * WATCH_EVERY_S else max(full_s / 4, WATCH_CLOSELY_S)


def _exit_of(process: subprocess.Popen[bytes], group: ProcessGroup) -> int | None:
    """Return a descriptor that tells when a process has ended; SandboxError, with nothing left behind, without one."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(process.pid)
    except OSError as error:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        group.close()
        raise SandboxError(f"The sandbox cannot be watched: {error.strerror}.") from error


def _wait(process: subprocess.Popen[bytes], within_s: float) -> tuple[int | None, float]:
    """Reap a child: its status, and the CPU time of it and of what it and its descendants reaped."""
    clock = AwakeClock()
    while True:
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, used.ru_utime + used.ru_stime
        if clock.now() > within_s:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            return None, 0.0
        time.sleep(0.001)
