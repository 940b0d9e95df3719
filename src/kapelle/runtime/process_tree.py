"""Manage parent and child processes of a run.

A child process ends together with its parent, and a parent distinguishes a stopped child from a slow child.

A child polls the process id of its parent (`end_with_parent`), because there is no other sign that `kill -9` has ended the parent. A
stopped child (SIGSTOP) cannot poll, so each child asks the kernel to continue it when its parent ends. Before the child has done
this, its process group has the same effect: a child starts in its own group in the session of its parent (`process_group=0`). When
the parent is killed, the group becomes orphaned, and the kernel sends SIGHUP and SIGCONT to an orphaned group with a stopped process.

A parent checks two signs of life of each child (`LifeSigns`): heartbeats from a thread of the child, and the CPU time of the child.
If code holds Python's global interpreter lock for a long time, there are no heartbeats, but CPU time is used, so the child is
considered slow. A stopped process shows neither sign, and is considered dead after `stalled_after()` seconds. A process that shows
neither sign but is not stopped may be waiting for a disk or a driver, and is considered dead after ten times this period.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kapelle.errors import ConfigError
from kapelle.runtime import interrupts
from kapelle.runtime.machine import log_last

_FORM = struct.Struct("=QQB")
"""Memory format of the status: the number of heartbeats, the session, and the length of the text that follows."""
_MOST = 160
"""Maximum number of bytes of the text in the status."""


class SharedStatus:
    """A small block of memory in which a process shares its number of heartbeats and its current work with its parent.

    The parent can read this memory even if the process has ended or does not respond. The memory is an unnamed file.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """Create the memory, or open the memory of another process by its file descriptor."""
        size = _FORM.size + _MOST
        if descriptor is None:
            file, path = tempfile.mkstemp(prefix="kapelle-pulse-")
            os.unlink(path)  # noqa: PTH108 - `path` is a string
            os.ftruncate(file, size)
            descriptor = file
        self.descriptor = descriptor
        self._shared = mmap.mmap(descriptor, size)

    @property
    def beats(self) -> int:
        """Number of heartbeats that the process has sent."""
        return int(_FORM.unpack_from(self._shared)[0])

    @property
    def session(self) -> int:
        """Number (from 1) of the session that is running, which is an episode state of an environment.

        The value is 0 if no session is running.
        """
        return int(_FORM.unpack_from(self._shared)[1])

    @property
    def doing(self) -> str:
        """The work that the process recorded last. The string is empty at first."""
        length = int(_FORM.unpack_from(self._shared)[2])
        return self._shared[_FORM.size : _FORM.size + length].decode("utf-8", "replace")

    def beat(self) -> None:
        """Send a heartbeat."""
        struct.pack_into("=Q", self._shared, 0, self.beats + 1)

    def enter(self, session: int) -> None:
        """Record the number of the session that is running from now on, or 0 if no session is running."""
        struct.pack_into("=Q", self._shared, 8, session)

    def say(self, doing: str) -> None:
        """Record what this process is currently doing, so that its parent can read it."""
        text = doing.encode("utf-8", "replace")[:_MOST]
        self._shared[_FORM.size : _FORM.size + len(text)] = text
        struct.pack_into("=B", self._shared, 16, len(text))

    def close(self) -> None:
        """Release the shared memory."""
        self._shared.close()
        os.close(self.descriptor)


LIMIT = "KAPELLE_STALLED_AFTER"
"""Name of the environment variable that sets `stalled_after`."""
STALLED_AFTER = 60.0
"""Default of `stalled_after` in seconds."""
WAITING = 10.0
"""Factor by which the limit `stalled_after` is longer for a process that is not stopped, because the process may be waiting for a disk."""
GONE = 5.0
"""Maximum time in seconds until another sign shows that a process has ended normally."""
LOOK = 0.5
"""Time in seconds between two checks of the parent, and between two heartbeats."""
SPEAKS = 3.0
"""Maximum time in seconds for rank 0 to print why all ranks stop."""
LAST = "its end"
"""The last recorded work (`doing`) of a rank, after all saves."""
EXIT_ALONE = 3
"""Exit code of a process that has lost its parent, and of a rank that exits because another rank was lost."""
PLACE = "KAPELLE_PLACE"
"""Name of an environment variable that `kapelle train --launch torchrun` sets for each rank. The variable contains the process id of the
launcher and the file descriptors of the rank's SharedStatus and of its listening socket."""

_PR_SET_PDEATHSIG = 1


def stalled_after() -> float:
    """Return the time in seconds after which a stopped process of a run is considered dead."""
    given = os.environ.get(LIMIT, "")
    try:
        seconds = float(given) if given else STALLED_AFTER
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ConfigError(
            f"{LIMIT} is {given!r}. Set it to the seconds after which a stopped process counts as dead, such as 60."
        )
    return seconds


def end_with_parent(
    parent: int, last: Callable[[], None] = lambda: None, stopped: Callable[[], None] = lambda: None
) -> None:
    """End this process within a second after its parent ends, and call `last` before that.

    The function `stopped` is called when the parent has been stopped for `stalled_after()` seconds while this process was running.
    """
    if sys.platform == "linux":
        # A stopped process cannot poll, so the kernel continues it. The kernel already sends SIGCONT when the *thread* that started
        # this process ends, which has no effect on a running process.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
    if hasattr(signal, "SIGTTOU"):  # let it print for its parent, even under `stty tostop`
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    def watch() -> None:
        still, looked, limit = 0.0, time.monotonic(), stalled_after()
        while os.getppid() == parent:
            time.sleep(LOOK)
            passed, looked = time.monotonic() - looked, time.monotonic()
            before, still = still, still + min(passed, 2 * LOOK) if is_stopped(parent) else 0.0
            if before < limit <= still:
                stopped()
        try:
            last()
        finally:
            os._exit(EXIT_ALONE)

    threading.Thread(target=watch, name="kapelle-parent", daemon=True).start()


def end_with_stdin(last: Callable[[], None] = lambda: None) -> None:
    """Call `last` and end this process when its standard input is closed.

    Standard input is a pipe that closes when the parent ends.
    """

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        try:
            last()
        finally:
            os._exit(EXIT_ALONE)

    threading.Thread(target=watch, name="kapelle-parent", daemon=True).start()


def end_session(session: int) -> None:
    """Kill all processes of a session except this process."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(entry.name)) == session and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)


class LifeSigns:
    """The signs of life of a process on this machine. The method `look` must be called repeatedly."""

    def __init__(self, pid: int, beats: Callable[[], int] = lambda: 0) -> None:
        """Watch a process. The function `beats` returns the number of its heartbeats."""
        self.pid, self._beats = pid, beats
        self._seen = (-1, -1)
        self._silent = self._stopped = self._gone = 0.0
        self._sees = bool(_state(os.getpid())[0])
        self._limit = stalled_after()

    def look(self, passed: float) -> str | None:
        """Return the reason why the process is considered dead, or None if the process is alive.

        The argument `passed` is the time in seconds since the last call. The caller limits this value, so that time in which the
        caller itself was stopped is not counted.
        """
        state, used = _state(self.pid)
        # A zombie belongs to another parent: this process would have waited for it.
        self._gone = self._gone + passed if self._sees and state in ("", "Z", "X") else 0.0
        if self._gone > GONE:
            return "it has ended"
        seen = (self._beats(), used)
        self._silent = 0.0 if seen != self._seen else self._silent + passed
        self._stopped = self._stopped + passed if state in ("T", "t") else 0.0
        self._seen = seen
        if self._stopped >= self._limit:
            by = "by a debugger" if state == "t" else "by SIGSTOP or Ctrl-Z"
            return f"it has been stopped ({by}) for {self._limit:g} s"
        if self._silent >= WAITING * self._limit:
            held = " and is waiting for a disk or a driver" if state == "D" else ""
            return f"it has given no sign of life for {WAITING * self._limit:g} s{held}"
        return None


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, or False if its state is unknown."""
    return _state(pid)[0] in ("T", "t")


def _state(pid: int) -> tuple[str, int]:
    """Return the letter with which the kernel denotes the state of a process, and its CPU time in ticks.

    If the state is unknown, the letter is empty and the CPU time is 0.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return "", 0
    return fields[0], int(fields[11]) + int(fields[12])


def how_it_ended(code: int) -> str:
    """Return a phrase that describes how a process ended, given its exit code. A negative code is a signal number."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = f"{-code} ({signal.Signals(-code).name})"
    except ValueError:
        name = str(-code)
    return f"was killed by signal {name}"


def memory_hint(code: int) -> str:
    """Return a hint about memory for a process that was ended by SIGKILL, or else an empty string.

    The hint can be appended to a message.
    """
    if code != -signal.SIGKILL:
        return ""
    return " Perhaps memory ran out: see `dmesg`, and `kapelle plan` for what a run needs."


def kill_group(group: int) -> None:
    """Kill all processes of a process group immediately, including stopped processes."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


@dataclass(slots=True)
class _OwnPlace:
    """Information about the launcher that started this process as a rank."""

    launcher: int | None = None
    """Process id of `kapelle train --launch torchrun`, which reports how each rank ended."""
    pulse: SharedStatus | None = None
    listening: int | None = None
    """File descriptor of the listening socket for the store of rank 0."""

    @property
    def launcher_reports(self) -> bool:
        """Whether a launcher is running that reports how the ranks ended."""
        return self.launcher is not None and not is_stopped(self.launcher)


own_place = _OwnPlace()


def live(pulse: SharedStatus, parent: int) -> None:
    """Start to send heartbeats, and end this process together with its parent."""
    end_with_parent(parent)
    _start_heartbeat(pulse)


def join_launcher() -> None:
    """Connect this rank to the launcher that started it: send heartbeats to the launcher, and end together with the launcher.

    The environment variable `PLACE`, which `kapelle train --launch torchrun` sets, contains the details. If `torchrun` itself started
    the rank, the parent is the agent of `torchrun`.
    """
    place = os.environ.pop(PLACE, "")  # child processes have another parent
    if not place and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    if place:
        launcher, pulse, listening = place.split(",")
        parent = own_place.launcher = int(launcher)
        own_place.pulse = SharedStatus(int(pulse))
        own_place.listening = int(listening) if listening else None
        for descriptor in (own_place.pulse.descriptor, own_place.listening):
            if descriptor is not None:
                os.set_inheritable(descriptor, False)
        _start_heartbeat(own_place.pulse)
    end_with_parent(parent, lambda: _end_alone(parent), lambda: _stop_alone(parent))


RANK_LOG = logging.getLogger("kapelle.rank")
"""Logger of a rank, without output by default. The module `runs.rank_log` writes its messages to a file in the run directory."""
RANK_LOG.setLevel(logging.INFO)
RANK_LOG.propagate = False
RANK_LOG.addHandler(logging.NullHandler())


def doing(what: str) -> None:
    """Record the current work of this process, for the process that watches it, for its log and for the message of a stop."""
    RANK_LOG.info(what)
    interrupts.work = what
    if own_place.pulse is not None:
        own_place.pulse.say(what)


def _start_heartbeat(pulse: SharedStatus) -> None:
    def beat() -> None:
        while True:
            pulse.beat()
            time.sleep(LOOK)

    threading.Thread(target=beat, name="kapelle-pulse", daemon=True).start()


def _end_alone(launcher: int) -> NoReturn:
    """End a rank whose launcher has ended. The first rank of the machine prints the reason."""
    at = f" (at: {own_place.pulse.doing})" if own_place.pulse is not None and own_place.pulse.doing else ""
    _print_in_first(
        f"The launcher (process {launcher}) is gone, so the run ends{at}. Resume the run from its last checkpoint."
    )
    os._exit(EXIT_ALONE)


def _stop_alone(launcher: int) -> None:
    """Stop a rank in the same way as SIGTERM, because its launcher is stopped.

    A stopped launcher can no longer stop the ranks or notice that a rank has died.
    """
    if not _print_in_first(
        f"The launcher (process {launcher}) has been stopped for {stalled_after():g} s, so the run saves and ends. "
        "(Ctrl-Z pauses the whole run, for as long as you like.)"
    ):
        time.sleep(SPEAKS)  # joined ranks stop together with the first
    os.kill(os.getpid(), signal.SIGTERM)


def _print_in_first(text: str) -> bool:
    """Print a line in the first rank of the machine, and return whether this process is the first rank."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if first:
        line = f"kapelle: {text}\n".encode()
        with suppress(OSError):
            os.write(2, line)
        log_last(line)
    return first


# -------- A process that serves its parent over a socket

_SERVE = "import sys; sys.path[:] = {path!r}; from {module} import main; main({socket}, {pulse}, {parent})"
_STDERR = 2
"""The file descriptor of standard error."""


def start_server(
    module: str, pulse: SharedStatus, *shared: int
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that calls the function `main` of a module with a socket, the shared status and the id of this process.

    Returns the process and the other end of the socket. The process also inherits the file descriptors in `shared`.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        code = _SERVE.format(
            path=sys.path, module=module, socket=theirs.fileno(), pulse=pulse.descriptor, parent=os.getpid()
        )
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-c", code],
            pass_fds=(theirs.fileno(), pulse.descriptor, *shared),
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,  # keep output of environments out of this command's output
            process_group=0,  # a Ctrl-C in the terminal reaches this process alone, which ends the other
        )
    return process, ours
