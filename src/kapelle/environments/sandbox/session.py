"""Supervise one run: copy input and limited output, measure resource use, and kill all processes of the run.

The supervision is the same for every backend. The `ProcessGroup` of a backend measures and kills the processes of a run.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kapelle.environments.sandbox.contract import Layer, LimitName, Limits, Result
from kapelle.environments.sandbox.usage import Usage
from kapelle.errors import SandboxError
from kapelle.runtime.clock import SuspendAwareClock

# -------- The last protection of the weak mode: it watches memory that the machine loses to its kernel during a run
#
# Limits and sums cover every known kind of memory. Memory that they miss (a table behind a new option of a system call, a leak)
# is still missing from the machine. Therefore, the machine's own counters are read a few times a second. The memory that the
# kernel holds beyond what the counters attribute is compared with the time that each run spends in the kernel, because a run
# takes memory from the kernel only while it is in the kernel. Memory of processes, files and page tables is not part of the
# comparison, so other programs may use any amount of it.

NET_EVERY_S = 0.2
"""Time in seconds between two readings of the memory counters of the machine during runs."""
_FASTEST = 8 * 1024**3
"""Upper bound on the number of bytes that a run can make the kernel allocate in one second of system time. The actual rate is
lower, because zeroing pages takes longer."""
_TICK_S = 0.01
"""Delay in seconds with which the kernel accounts for system time."""
_SETTLE_S = 2.0
"""Time in seconds after a run is suspected during which no other run is suspected, because the kernel is still freeing the
memory of the first run."""
_RETURN_WITHIN_S = 1.0
"""Maximum time in seconds in which the kernel is expected to free the memory of a killed run. The kernel frees this memory
after a grace period."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MEMINFO = Path("/proc/meminfo")
_ZONEINFO = Path("/proc/zoneinfo")
_ATTRIBUTED = (
    *(b"MemFree", b"Buffers", b"Cached", b"SwapCached", b"AnonPages", b"KReclaimable", b"Hugetlb"),
    # The sum over a run already includes the page tables of each process, and the number of threads is limited.
    *(b"PageTables", b"SecPageTables", b"KernelStack"),
    # Memory that the host has taken back from this virtual machine.
    b"Balloon",
)


def unattributed_bytes(meminfo: Path = _MEMINFO, zoneinfo: Path = _ZONEINFO) -> int | None:
    """Return the number of bytes that the kernel uses for itself, without page tables and stacks, or None if it is not reported."""
    try:
        held = {
            name: int(value.split()[0]) * 1024
            for name, _, value in (line.partition(b":") for line in meminfo.read_bytes().splitlines())
        }
        # MemFree does not include free pages that a core keeps for later use, which are hundreds of megabytes after a large process.
        spare = sum(map(int, re.findall(rb"^ +count: +([0-9]+)", zoneinfo.read_bytes(), re.MULTILINE)))
        pages = spare * _PAGE_BYTES
        return held[b"MemTotal"] - sum(held.get(name, 0) for name in _ATTRIBUTED) - pages
    except (OSError, KeyError, ValueError, IndexError):
        return None


def came_back(held: int, wanted: int) -> bool:
    """Return whether the kernel frees at least `wanted` of the `held` bytes within a short time."""
    until = time.monotonic() + _RETURN_WITHIN_S
    while True:
        left = unattributed_bytes()
        if left is not None and held - left >= wanted:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.02)


class Net:
    """A monitor that attributes memory lost by the machine to the runs that executed in the kernel at that time."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._accounts: weakref.WeakKeyDictionary[Session, _Account] = weakref.WeakKeyDictionary()
        self._next = self._quiet_until = 0.0

    def rest(self) -> None:
        """Discard the last reading, so that changes in a period without runs are not attributed to a later run."""
        self._before, self._next = None, 0.0

    def look(self, runs: Iterable[Session], now: float, held: int | None = None) -> None:
        """Read the memory counters if the next reading is due, and mark at most one run as suspected.

        The marked run is the run that spent the most time in the kernel, among all runs that may hold too much memory.
        """
        if now < self._next:
            return
        self._next = now + NET_EVERY_S
        held = unattributed_bytes() if held is None else held
        if held is None:
            return
        grown = 0 if self._before is None else held - self._before
        self._before = held
        worst: tuple[float, Session] | None = None
        for run in runs:
            used = run.kernel_s()
            if used is None:
                continue
            account = self._accounts.setdefault(run, _Account(held - max(grown, 0)))
            charged, meanwhile_s = account.charge(grown, held, *used)
            if charged > run.limits.unexplained_bytes and (worst is None or meanwhile_s > worst[0]):
                worst = meanwhile_s, run
        if worst is not None and now >= self._quiet_until:
            self._quiet_until = now + _SETTLE_S
            worst[1].suspected = True


class _Account:
    """The memory that one run may have made the kernel allocate."""

    def __init__(self, least: int) -> None:
        self._least, self._charged, self._waiting = least, 0, 0
        self._cpu_s, self._kernel_s, self._meanwhile_s = 0.0, 0.0, 0.0

    def charge(self, grown: int, held: int, cpu_s: float, kernel_s: float) -> tuple[int, float]:
        """Add the growth of kernel memory that the run can have caused in its system time.

        Returns the sum and the time in seconds that the run spent in the kernel during this growth.
        """
        ran, in_kernel = cpu_s > self._cpu_s, max(kernel_s - self._kernel_s, 0.0)
        self._cpu_s, self._kernel_s = cpu_s, kernel_s
        self._least = min(self._least, held)
        if ran and grown > 0:
            self._waiting += grown
        if in_kernel and self._waiting:
            # The kernel updates its accounts in ticks, so the growth waits for the next tick.
            self._charged += min(self._waiting, int((in_kernel + _TICK_S) * _FASTEST))
            self._meanwhile_s += in_kernel
            self._waiting = 0
        # Charge at most the memory that is missing now, so that fluctuations do not add up.
        self._charged = max(min(self._charged, held - self._least), 0)
        return self._charged, self._meanwhile_s


# -------- Measures runs while no call waits for them, because a program may continue between two calls

LOOK_EVERY_S = 0.05
"""Time in seconds between two measurements of a run while no call waits for the run."""


class _Watcher:
    """A single thread that measures all runs of a process and sleeps while there are no runs."""

    def __init__(self) -> None:
        self._runs: weakref.WeakSet[Session] = weakref.WeakSet()
        self._change = threading.Condition()
        threading.Thread(target=self._look, name="kapelle-sandbox-watcher", daemon=True).start()

    def add(self, run: Session) -> None:
        with self._change:
            self._runs.add(run)
            self._change.notify_all()

    def remove(self, run: Session) -> None:
        with self._change:
            self._runs.discard(run)

    def _look(self) -> None:
        net = Net()
        while True:
            with self._change:
                if not self._runs:
                    net.rest()
                self._change.wait_for(lambda: len(self._runs) > 0)
                runs = list(self._runs)
            for run in runs:
                # The run has ended, or this process has no descriptors left; the next measurement or call reports this.
                with contextlib.suppress(OSError):
                    run.look()
            net.look(runs, time.monotonic())
            del runs
            time.sleep(LOOK_EVERY_S)


@functools.cache
def _watcher(process: int) -> _Watcher:
    # Threads do not survive a fork.
    return _Watcher()


WATCH_EVERY_S = 0.02
"""Time in seconds between two measurements of a run."""
WATCH_CLOSELY_S = 0.004
"""Minimum time in seconds between two measurements of a run that grows so fast that it would soon exceed its memory limit."""
BEGIN_WITHIN_S = 30.0
"""Maximum time in seconds for a sandbox to unpack its files, before the wall-clock time of the program starts."""
LEAST_GRANTED_S = 0.05
"""Minimum time in seconds of waiting for a CPU core that is compensated. Shorter waits occur in every program."""
KILL_WITHIN_S = 0.4
"""Maximum time in seconds to wait for killed processes to exit."""
_CHUNK = 65536


class ProcessGroup:
    """The processes of one run, as seen by a backend; this base class measures nothing and kills only the first process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def begin(self, within_s: float) -> None:
        """Start to count the resource use; this method is called immediately before the program starts."""

    def usage(self) -> Usage | None:
        """Return the current resource use of the processes, or None if it is unknown."""
        return None

    def waited_s(self) -> float:
        """Return the longest time in seconds that a thread of the processes has waited for a CPU core, or 0 if it is unknown."""
        return 0.0

    def kernel_s(self) -> tuple[float, float] | None:
        """Return the total CPU time of the processes and the part spent in the kernel, both in seconds.

        The result is None if a cgroup counts all memory of the processes.
        """
        return None

    def kill(self, within_s: float) -> None:
        """Kill all processes and wait until they have exited; this method may be called more than once."""
        self._process.kill()

    def close(self) -> None:
        """Free the resources that the backend uses for the run, such as descriptors, directories and names."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The messages that are exchanged with a sandbox before its program starts."""

    message: bytes
    """The first input of the waiting sandbox."""
    greeting: bytes
    """The string that the sandbox writes to standard output immediately before the program starts. Output before the greeting
    does not come from the program, and a run without a greeting never began."""


class Session:
    """An active run with limited output, which is closed with `finish`."""

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
        self.limits = limits
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
        # This clock counts the time while this process waits for the program, but not while this process is stopped.
        self._clock = SuspendAwareClock()
        self._started = self._clock.now()
        self._looked = self._started
        self._next_watch = self._started + WATCH_EVERY_S
        # A descriptor that becomes readable when the process has ended.
        self._exit_fd: int | None = None
        if hasattr(os, "pidfd_open"):
            try:
                self._exit_fd = os.pidfd_open(process.pid)
            except OSError as error:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout, process.stderr):
                    pipe.close()
                group.close()
                raise SandboxError(f"The sandbox cannot be monitored: {error.strerror}.") from error
        self.ended = False
        """Whether the program has exited by itself."""
        self.suspected = False
        """Whether the machine has lost memory and this run is the main suspect. If so, the next measurement ends the run."""
        self._lost_by_others = False
        self._result: Result | None = None
        for fd in (self._stdin, *self._output):
            os.set_blocking(fd, False)
        self._turn = threading.RLock()
        _watcher(os.getpid()).add(self)

    def kernel_s(self) -> tuple[float, float] | None:
        """Return the total CPU time of the run and the part spent in the kernel, both in seconds; None before the program starts."""
        return None if self._waiting else self._group.kernel_s()

    @property
    def limit(self) -> LimitName | None:
        """The name of the limit that ended the run, or None if no limit was reached."""
        return self._limit

    def send(self, data: bytes) -> None:
        """Write data to the standard input of the program; data for a program that has exited is discarded."""
        with self._turn:
            self._input += data
            self._pump(lambda: not self._input, math.inf)
            self._check_begun()

    def look(self) -> None:
        """Kill the run if it exceeds its limits.

        The method does nothing while another call uses the session, because that call checks the limits itself.
        """
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self._result is None and not self.ended and self._limit is None:
                if self._waiting:
                    self._move(0.0)
                if self._is_above_a_limit():
                    self._kill()
        finally:
            self._turn.release()

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next line of standard output without its line break, or None if no line arrives within `timeout_s` seconds."""
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
        """Close the input, wait until the run ends within its limits, free all resources, and return the result.

        With `kill`, the run is killed immediately. Repeated calls return the same result.
        """
        with self._turn:
            if self._result is not None:
                self._check_own_fault()
                return self._result
            try:
                self._input_ends = True
                if not kill:
                    self._pump(lambda: False, math.inf)
                self._kill()
                self._drain()
                wall_s = self._clock.now() - self._started
                status, cpu_s = _wait(self._process, KILL_WITHIN_S)
                cpu_s = max(cpu_s, self._seen_cpu_s)
                # A program that was ended by a signal has a negative status, or a status above 128 from the shell that waits for
                # it.
                by_signal = None
                if status is not None and (status < 0 or status > 128):
                    by_signal = -status if status < 0 else status - 128
                if self._limit is None and (cpu_s > self.limits.cpu_s or by_signal == signal.SIGXCPU):
                    self._limit = "cpu"
                self._result = Result(
                    stdout=bytes(self._output[self._stdout][0 if self._waiting else len(self._greeting) :]),
                    stderr=bytes(self._output[self._stderr]),
                    exit_code=None if self._limit or by_signal is not None else status,
                    signal=None if self._limit else by_signal,
                    limit=self._limit,
                    wall_s=wall_s,
                    cpu_s=cpu_s,
                    peak_memory_bytes=self._peak_memory,
                )
                if not kill:
                    self._check_begun()
                self._check_own_fault()
                return self._result
            finally:
                _watcher(os.getpid()).remove(self)
                self._close_input()
                for pipe in (self._process.stdout, self._process.stderr):
                    assert pipe is not None
                    pipe.close()
                if self._exit_fd is not None:
                    os.close(self._exit_fd)
                    self._exit_fd = None
                self._group.close()

    def _kill(self) -> None:
        """Kill all processes of the run; if the run was suspected, check whether the kernel frees the lost memory."""
        suspected, self.suspected = self.suspected and self._limit == "memory", False
        held = unattributed_bytes() if suspected else None
        self._group.kill(KILL_WITHIN_S)
        if held is not None:
            self._lost_by_others = not came_back(held, self.limits.unexplained_bytes // 2)

    def _check_own_fault(self) -> None:
        """Raise SandboxError if the run was killed because of memory that other processes hold, so that the program is not at fault."""
        if self._lost_by_others:
            raise SandboxError(
                f"The machine lost more than {self.limits.unexplained_bytes:,} bytes of memory to its kernel while a program "
                "ran in a sandbox. The program was ended, but the kernel did not free the memory, so something else holds it. "
                "Look at Slab and VmallocUsed in /proc/meminfo, or raise `unexplained_bytes` in the sandbox's limits."
            )

    @property
    def _deadline(self) -> float:
        return self._started + (BEGIN_WITHIN_S if self._waiting else self.limits.wall_s + self._granted_s)

    def _check_begun(self) -> None:
        """Raise SandboxError if the run ended before its program started, so that the program is not at fault."""
        if self._waiting and (self.ended or self._limit is not None):
            result = self.finish(kill=True)
            late = f"it was not ready within {BEGIN_WITHIN_S:g} s; this machine may be overloaded or short of memory"
            why = late if self._limit == "wall" else "no reason was given"
            said = result.stderr.decode(errors="replace").strip()[-400:]
            raise SandboxError(f"The sandbox could not start the program: {said or why}.")

    def _pump(self, done: Callable[[], bool], until: float) -> None:
        """Copy input and output until `done` returns True, the program exits, a limit is reached, or a deadline passes.

        The deadline is extended by any time that is granted during the call.
        """
        granted_before = self._granted_s
        while not done() and not self.ended and self._limit is None:
            now = self._clock.now()
            stop = min(until + self._granted_s - granted_before, self._deadline)
            if now >= stop and not self._grant():
                if now >= self._deadline:
                    self._limit = "wall"
                return
            if now >= self._next_watch:
                before_look = self._memory
                self._is_above_a_limit()
                room = self.limits.memory_bytes - self._memory
                self._next_watch = now + look_again_s(self._memory - before_look, now - self._looked, room)
                self._looked = now
            self._move(max(min(stop, self._next_watch) - now, 0.0))

    def _grant(self) -> bool:
        """Extend the time limit by the time that the program waited for a CPU core; return whether the limit was extended."""
        if self._waiting or not self.limits.patience:
            return False
        most_s = self.limits.wall_s * self.limits.patience
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
                try:
                    del self._input[: os.write(self._stdin, self._input[:_CHUNK])]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    self._input.clear()
                    self._close_input()
            elif fd == self._exit_fd:
                self._end()
            else:
                self._read(fd)

    def _end(self) -> None:
        self.ended = True
        # The program's last output may have come after the last reading of the pipes, and its last use after the last measurement.
        self._drain()
        if self._limit is None:
            self._is_above_a_limit()

    def _close_input(self) -> None:
        if self._input_open:
            self._input_open = False
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _read(self, fd: int) -> bool:
        """Read the available output and return whether there was any; output beyond the limit is discarded."""
        room = self.limits.output_bytes + len(self._greeting) - sum(map(len, self._output.values()))
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
        """Read the remaining output from the pipes.

        All writers have exited, so the remaining output is at most as large as the pipes.
        """
        for fd in tuple(self._open):
            while self._read(fd) and self._limit != "output":
                pass

    def _is_above_a_limit(self) -> bool:
        """Measure the run, store the name of an exceeded limit, and return whether a limit is exceeded."""
        if self.suspected:
            self._limit = "memory"
            return True
        # Before the greeting, the mounts may still be those of the host, and the resource use is not that of the program.
        usage = None if self._waiting else self._group.usage()
        if usage is None:
            return False
        self._memory = usage.memory_bytes
        self._peak_memory = max(self._peak_memory, self._memory)
        self._seen_cpu_s = max(self._seen_cpu_s, usage.cpu_s)
        if usage.memory_bytes > self.limits.memory_bytes or not usage.countable:
            self._limit = "memory"
        elif usage.files > self.limits.files:
            self._limit = "files"
        elif usage.cpu_s > self.limits.cpu_s:
            self._limit = "cpu"
        else:
            return False
        return True


def look_again_s(grown: int, in_s: float, room: int) -> float:
    """Return the time in seconds until the next measurement of a run.

    The run has grown by `grown` bytes in `in_s` seconds and has `room` bytes left. If the run could reach its memory limit
    within two regular intervals, the result is a quarter of the expected time to the limit, but at least `WATCH_CLOSELY_S`.
    """
    full_s = math.inf if grown <= 0 else room * in_s / grown
    return WATCH_EVERY_S if full_s > 2 * WATCH_EVERY_S else max(full_s / 4, WATCH_CLOSELY_S)


def _wait(process: subprocess.Popen[bytes], within_s: float) -> tuple[int | None, float]:
    """Reap a child process; return its exit status and the CPU time in seconds of the child and of its reaped descendants."""
    clock = SuspendAwareClock()
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


# -------- How a program is started


class Prepared(Protocol):
    """A sandbox that is ready for one program."""

    def start(self, files: Mapping[str, bytes], command: Sequence[str]) -> Session:
        """Copy the files into the work directory and start the command there; the wall-clock time of the run starts with this call."""
        ...

    def discard(self) -> None:
        """Free the sandbox if it is unused; after `start`, this method does nothing."""
        ...


class Backend(Protocol):
    """A sandbox implementation, which prepares sandboxes for programs."""

    @property
    def name(self) -> str:
        """The name that selects the backend."""
        ...

    @property
    def python(self) -> str:
        """The path inside the sandbox of a Python interpreter that programs may use."""
        ...

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers of protection and whether this machine provides each of them; repeated calls are fast."""
        ...

    def prepare(self, limits: Limits) -> Prepared:
        """Prepare a sandbox; raise SandboxError if a required layer is missing."""
        ...


def run(
    backend: Backend,
    files: Mapping[str, bytes],
    command: Sequence[str],
    stdin: bytes = b"",
    limits: Limits | None = None,
) -> Result:
    """Run a command on files and return the result.

    `files` is a mapping from paths relative to the work directory to contents. Raises SandboxError if the machine cannot
    provide the sandbox or the files do not fit into it.
    """
    session = start(backend, files, command, limits or Limits())
    try:
        session.send(stdin)
    except BaseException:
        session.finish(kill=True)
        raise
    return session.finish()


def start(backend: Backend, files: Mapping[str, bytes], command: Sequence[str], limits: Limits) -> Session:
    """Start a command on files and return the active run; raise SandboxError like `run`."""
    prepared = backend.prepare(limits)
    try:
        return prepared.start(files, command)
    except BaseException:
        prepared.discard()
        raise
