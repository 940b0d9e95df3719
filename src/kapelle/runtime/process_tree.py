"""Parent and child processes of a run: a child ends with its parent, and a parent distinguishes a stopped child from a slow one.

A child polls who its parent is (`end_with_parent`), because that is the only sign of a parent that `kill -9` has ended. A child
that is stopped (SIGSTOP) polls nothing, so it has the kernel continue it when its parent ends. Until it has asked for that, its
process group does it: a child is started in a group of its own in its parent's session (`process_group=0`). Such a group is
orphaned when the parent is killed, and the kernel sends SIGHUP and SIGCONT to an orphaned group with a stopped process.

A parent looks at two signs of each child (`LifeSigns`): heartbeats, which a thread of the child gives, and its time on the
processor. Code that holds Python's lock for long gives no heartbeat but computes, so the child is slow. A process that the
kernel reports as stopped gives neither, and has `stalled_after()` seconds. One that gives neither and is not stopped may wait
for a disk or a driver, and has ten times as long.
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

_FORM = struct.Struct("=QQB")
"""Heartbeats, session, length of the text that follows."""
_MOST = 160
"""Most bytes of that text."""


class SharedStatus:
    """A few bytes of memory that a process shares with its parent: its heartbeat, and what it does at this moment.

    The parent can read them when the process is gone or does not answer. They lie in a file without a name.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """Make the memory, or open that of the other process by its descriptor."""
        size = _FORM.size + _MOST
        if descriptor is None:
            file, path = tempfile.mkstemp(prefix="kapelle-pulse-")
            os.unlink(path)  # noqa: PTH108 - the same, and at once
            os.ftruncate(file, size)
            descriptor = file
        self.descriptor = descriptor
        self._shared = mmap.mmap(descriptor, size)

    @property
    def beats(self) -> int:
        """How many heartbeats the process has given."""
        return int(_FORM.unpack_from(self._shared)[0])

    @property
    def session(self) -> int:
        """Number, from 1, of the session (an environment's world) that computes; 0 for none."""
        return int(_FORM.unpack_from(self._shared)[1])

    @property
    def doing(self) -> str:
        """What the process noted last that it does; empty before that."""
        length = int(_FORM.unpack_from(self._shared)[2])
        return self._shared[_FORM.size : _FORM.size + length].decode("utf-8", "replace")

    def beat(self) -> None:
        """Give a heartbeat."""
        struct.pack_into("=Q", self._shared, 0, self.beats + 1)

    def enter(self, session: int) -> None:
        """Note which session computes from now on; 0 for none."""
        struct.pack_into("=Q", self._shared, 8, session)

    def say(self, doing: str) -> None:
        """Note what this process does from now on."""
        text = doing.encode("utf-8", "replace")[:_MOST]
        self._shared[_FORM.size : _FORM.size + len(text)] = text
        struct.pack_into("=B", self._shared, 16, len(text))

    def close(self) -> None:
        """Give the memory back."""
        self._shared.close()
        os.close(self.descriptor)


LIMIT = "KAPELLE_STALLED_AFTER"
"""Environment variable that sets `stalled_after`."""
STALLED_AFTER = 60.0
"""Its default."""
WAITING = 10.0
"""How many times as long a process may give no sign of life while it is not stopped: it may wait for a disk or a driver."""
GONE = 5.0
"""Seconds within which the watcher of a process that ends normally learns of it otherwise."""
LOOK = 0.5
"""Seconds between two looks at the parent, and between two heartbeats."""
SPEAKS = 3.0
"""Seconds that rank 0 has to print for all ranks why they stop."""
LAST = "its end"
"""What a rank does (`doing`) once it has nothing left to save."""
EXIT_ALONE = 3
"""Exit code of a process whose parent is gone, and of a rank that ends because another one was lost."""
PLACE = "KAPELLE_PLACE"
"""Environment variable in which `kapelle train --launch torchrun` tells each rank the launcher's process, and the descriptors of
its SharedStatus and of its listening socket."""

_PR_SET_PDEATHSIG = 1


def stalled_after() -> float:
    """Return for how many seconds a process of a run may be stopped before the processes that wait for it give it up."""
    said = os.environ.get(LIMIT, "")
    try:
        seconds = float(said) if said else STALLED_AFTER
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ConfigError(
            f"{LIMIT} is {said!r}. Give it the seconds after which a process that is stopped is given up, as 60."
        )
    return seconds


def end_with_parent(
    parent: int, last: Callable[[], None] = lambda: None, stopped: Callable[[], None] = lambda: None
) -> None:
    """End this process within a second once process `parent` is not its parent any more, after `last`.

    `stopped` is called once the parent has been stopped for `stalled_after()` seconds, during which this process was not.
    """
    if sys.platform == "linux":
        # A stopped process cannot poll, so the kernel continues it. The kernel does so already when the *thread* ends that
        # started this process, which does no harm: SIGCONT does nothing to a process that runs.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
    if hasattr(signal, "SIGTTOU"):  # what it prints is its parent's output, also under `stty tostop`
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
    """End this process, after `last`, once its standard input is closed: a pipe that closes when the parent ends."""

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
    """Kill the processes of a session, except this one."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(entry.name)) == session and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)


class LifeSigns:
    """Signs of life of a process on this machine; call `look` again and again."""

    def __init__(self, pid: int, beats: Callable[[], int] = lambda: 0) -> None:
        """Take the process, and what returns the number of its heartbeats."""
        self.pid, self._beats = pid, beats
        self._seen = (-1, -1)
        self._silent = self._stopped = self._gone = 0.0
        self._sees = bool(_state(os.getpid())[0])
        self._limit = stalled_after()

    def look(self, passed: float) -> str | None:
        """Return why the process counts as dead, in words; None while it lives. `passed` are the seconds since the last look.

        The caller bounds `passed`, so that time in which it was stopped itself counts for one look.
        """
        state, used = _state(self.pid)
        # A zombie here is no child of this process, which would have waited for it.
        self._gone = self._gone + passed if self._sees and state in ("", "Z", "X") else 0.0
        if self._gone > GONE:
            return "it has ended without a word"
        seen = (self._beats(), used)
        self._silent = 0.0 if seen != self._seen else self._silent + passed
        self._stopped = self._stopped + passed if state in ("T", "t") else 0.0
        self._seen = seen
        if self._stopped >= self._limit:
            by = "by a debugger" if state == "t" else "by SIGSTOP or Ctrl-Z"
            return f"it has been stopped ({by}) for {self._limit:g} s"
        if self._silent >= WAITING * self._limit:
            held = " and waits for a disk or a driver" if state == "D" else ""
            return f"it has given no sign of life for {WAITING * self._limit:g} s{held}"
        return None


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped; False where the system cannot say."""
    return _state(pid)[0] in ("T", "t")


def _state(pid: int) -> tuple[str, int]:
    """Return the kernel's letter for the state of a process, and its ticks on the processor; nothing where it cannot say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return "", 0
    return fields[0], int(fields[11]) + int(fields[12])


def how_it_ended(code: int) -> str:
    """Return in words how a process ended, from its exit code; negative where a signal ended it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = f"{-code} ({signal.Signals(-code).name})"
    except ValueError:
        name = str(-code)
    return f"was killed by signal {name}"


def memory_hint(code: int) -> str:
    """Return the hint that memory may have run out, a sentence to append, for a process ended by SIGKILL; else nothing."""
    if code != -signal.SIGKILL:
        return ""
    return " If nobody sent the signal, memory ran out: `dmesg` says so, and `kapelle plan` what a run needs."


def kill_group(group: int) -> None:
    """End a group of processes at once, stopped ones too."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


@dataclass(slots=True)
class _OwnPlace:
    """What this process knows of the launcher that started it as a rank."""

    launcher: int | None = None
    """The process of `kapelle train --launch torchrun`, which reports how each rank ended."""
    pulse: SharedStatus | None = None
    listening: int | None = None
    """Descriptor of the socket at which rank 0 keeps the store."""

    @property
    def launcher_reports(self) -> bool:
        """Whether a launcher reports how this rank and the others ended; one that is stopped does not."""
        return self.launcher is not None and not is_stopped(self.launcher)


own_place = _OwnPlace()


def live(pulse: SharedStatus, parent: int) -> None:
    """Give heartbeats from now on, and end with the parent."""
    end_with_parent(parent)
    threading.Thread(target=_beat, args=(pulse,), name="kapelle-pulse", daemon=True).start()


def join_launcher() -> None:
    """Join the launcher that started this process as a rank: end with it, and give it heartbeats.

    `kapelle train --launch torchrun` says in a variable what that needs. Under `torchrun` itself the parent is its agent.
    """
    said = os.environ.pop(PLACE, "")  # what this process starts has another parent
    if not said:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            parent = os.getppid()
            end_with_parent(parent, lambda: _end_alone(parent), lambda: _stop_alone(parent))
        return
    launcher, pulse, listening = said.split(",")
    own_place.launcher, own_place.pulse = int(launcher), SharedStatus(int(pulse))
    own_place.listening = int(listening) if listening else None
    for descriptor in (own_place.pulse.descriptor, own_place.listening):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    end_with_parent(own_place.launcher, lambda: _end_alone(int(launcher)), lambda: _stop_alone(int(launcher)))
    threading.Thread(target=_beat, args=(own_place.pulse,), name="kapelle-pulse", daemon=True).start()


RANK_LOG = logging.getLogger("kapelle.rank")
"""What a rank reports of itself; nothing by default. `runs.rank_log` writes it to a file of the run directory."""
RANK_LOG.setLevel(logging.INFO)
RANK_LOG.propagate = False
RANK_LOG.addHandler(logging.NullHandler())


def doing(what: str) -> None:
    """Note what this process does from now on, for the one that watches it and in its log."""
    RANK_LOG.info(what)
    if own_place.pulse is not None:
        own_place.pulse.say(what)


def _beat(pulse: SharedStatus) -> None:
    while True:
        pulse.beat()
        time.sleep(LOOK)


def _end_alone(launcher: int) -> NoReturn:
    """End a rank whose launcher is gone; the first rank of the machine says so."""
    at = f" (at: {own_place.pulse.doing})" if own_place.pulse is not None and own_place.pulse.doing else ""
    _said_by_first(
        f"The launcher (process {launcher}) is gone, and the run ends with it{at}. Resume the run: nothing is lost but the "
        "steps since its last checkpoint."
    )
    os._exit(EXIT_ALONE)


def _stop_alone(launcher: int) -> None:
    """Stop a rank as SIGTERM does, because its launcher is stopped: it could not stop the ranks, or see one die, any more."""
    if not _said_by_first(
        f"The launcher (process {launcher}) has been stopped for {stalled_after():g} s: the run saves and ends. "
        "(Ctrl-Z stops a run whole, for as long as you like.)"
    ):
        time.sleep(SPEAKS)  # ranks that have joined stop all together, with the first
    os.kill(os.getpid(), signal.SIGTERM)


def _said_by_first(text: str) -> bool:
    """Print a line in the first rank of the machine; return whether this process is that."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if first:
        with suppress(OSError):
            os.write(2, f"kapelle: {text}\n".encode())
    return first


# -------- A process that serves its parent over a socket

_SERVE = "import sys; sys.path[:] = {path!r}; from {module} import main; main({socket}, {pulse}, {parent})"
_STDERR = 2
"""The descriptor of the standard error stream."""


def start_server(
    module: str, pulse: SharedStatus, *shared: int
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that calls `main` of a module with its end of a socket, the pulse and this process's number.

    Returns the process and the other end of the socket. The process also inherits the descriptors in `shared`.
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
            stdout=_STDERR,  # what environments print there must not mix with this command's output
            process_group=0,  # a Ctrl-C in the terminal reaches this process alone, which closes that one
        )
    return process, ours
