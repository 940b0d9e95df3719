"""Handle stop requests: the current training step finishes and is saved, or the run can later be resumed from its last checkpoint.

    with catch_interrupts() as interrupts:      # signals are converted to a stop request
        with finishing(): step()                # finishes before the stop
        evaluate()                              # may stop earlier (`stop_if_requested`, `to_notify`) and raise StopRequested
        with unbroken(): save()                 # always runs to its end
    sys.exit(interrupts.exit_code)

The first SIGINT (Ctrl-C), SIGTERM or SIGHUP (the terminal was closed) is a stop request. The exit code is 128 plus the signal number,
as in shells: 129 for SIGHUP, 130 for SIGINT and 143 for SIGTERM.

A second Ctrl-C ends the command `kapelle` immediately. The watchdog also ends the command `stop_within()` seconds after SIGTERM or
SIGHUP. Ending the command at any time is safe, because the files on disk are complete at every moment, so that the run can be resumed
from its last checkpoint. A process that does not run the command, such as a notebook, is never ended; in such a process, a second
Ctrl-C raises KeyboardInterrupt.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from kapelle.errors import ConfigError
from kapelle.runtime.early_stop import end_at_once
from kapelle.runtime.watchdog import end_process, every_tick

T = TypeVar("T")

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that request a stop. On Windows, SIGHUP does not exist."""

commands: list[object] = []
"""Non-empty while this process runs the command `kapelle`, which the watchdog may end."""

left_behind: list[object] = []
"""Coroutines, tasks and threads that exceeded their time limit and that this process could not end.

References to these objects are kept. Otherwise, Python would close the coroutines by raising an exception in them, on any thread, and
user code could then run forever.
"""

LAST_RESORT = 5.0
"""Time in seconds until the watchdog ends a command whose signal handler cannot run or has no effect."""

FINISHING = 5.0
"""Default of `stop_within` in seconds."""
STOP_WITHIN = "KAPELLE_STOP_WITHIN"
"""Name of the environment variable that sets `stop_within`, for schedulers that wait longer."""


class StopRequested(BaseException):
    """Exception that ends the current work after a stop request."""


ending: list[int] = []
"""Signals that are ending this command with KeyboardInterrupt; see `cli/stopping.py`."""


class Interrupts:
    """The stop request of this process, if a stop was requested."""

    def __init__(self, notify: Callable[[signal.Signals], None]) -> None:
        self.received: signal.Signals | None = None
        """The first signal that was received, or None if no stop was requested."""
        self._notify = notify

    @property
    def exit_code(self) -> int:
        """The exit code: 128 plus the number of the first signal, or 0 if no stop was requested."""
        return 0 if self.received is None else 128 + self.received

    def receive(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal. The first signal requests a stop, and a second Ctrl-C ends the command."""
        hung_up(number)
        if self.received is None:
            self.received = signal.Signals(number)
            self._notify(self.received)
            if stop_requested():
                for notify in tuple(to_notify):
                    notify()
        elif number == signal.SIGINT:
            if not commands:
                raise KeyboardInterrupt
            end_at_once(self.received)


def hung_up(number: int) -> None:
    """Discard all further output after SIGHUP, because writing to a closed terminal fails."""
    if number == getattr(signal, "SIGHUP", None):
        for stream in (1, 2):
            with suppress(OSError):
                if gone_terminal(stream):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, stream)
                    os.close(nowhere)


def gone_terminal(descriptor: int) -> bool:
    """Return whether a file descriptor belongs to a terminal that was closed."""
    found, nowhere = os.fstat(descriptor), Path(os.devnull).stat()
    return stat.S_ISCHR(found.st_mode) and found.st_rdev != nowhere.st_rdev and not os.isatty(descriptor)


_catching: list[Interrupts] = []
"""The stop requests of all open `catch_interrupts` blocks, starting with the outermost block."""
to_notify: list[Callable[[], None]] = []
"""Functions that the signal handler calls when a stop is requested."""
_unbroken: list[object] = []
"""A list with one entry for each running `unbroken` block."""
_finishing: list[object] = []
"""A list with one entry for each running `finishing` block."""
agreements: list[Agreement] = []
"""Non-empty while this process is one of several ranks, which stop together."""
_handlers_before: dict[int, Any] = {}
"""The signal handlers before the outermost `catch_interrupts` block or command. A forked child process restores them."""


class Agreement:
    """The agreement of all ranks to stop together at their next exchange of data (`ranks.py`).

    Before this exchange, a rank that received a signal stops only in work that the other ranks do not take part in.
    """

    def __init__(self) -> None:
        self.reached = False
        """Whether the ranks have agreed to stop."""
        self.apart = False
        """Whether this process is working on its own share of the work, without the other ranks."""

    def meet(self, number: int) -> None:
        """Record the number of the signal that a rank has received, or 0 if it has received no signal."""
        self.reached = bool(number)
        if number:
            for each in _catching:
                if each.received is None:
                    each.receive(number)


def requested_by() -> int:
    """Return the number of the signal that requested a stop, or 0 if no stop was requested."""
    return next((int(each.received) for each in _catching if each.received is not None), 0)


def _held_back() -> bool:
    """Return whether this rank must wait until all ranks agree to stop."""
    return bool(_catching) and any(not each.reached and not each.apart for each in agreements)


def stop_within() -> float:
    """Return the time in seconds in which a step must finish after SIGTERM or SIGHUP.

    Raises ConfigError if the environment variable is invalid.
    """
    given = os.environ.get(STOP_WITHIN, "")
    try:
        seconds = float(given) if given else FINISHING
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ConfigError(
            f"{STOP_WITHIN} is {given!r}. Set it to the seconds that a step may take after SIGTERM, such as 60."
        )
    return seconds


def stop_requested() -> bool:
    """Return whether the current work should stop now."""
    return bool(requested_by()) and not (_finishing or _unbroken or _held_back())


_here = threading.local()
"""Thread-local storage, in which `waited_for` is set on threads that the main thread waits for."""


def stops_here() -> bool:
    """Return whether stop requests apply to this thread, which must be the main thread or a thread that the main thread waits for."""
    return hasattr(_here, "waited_for") or threading.current_thread() is threading.main_thread()


def waited_for() -> None:
    """Record that the main thread is waiting for this thread."""
    _here.waited_for = True


def stop_if_requested() -> None:
    """Raise StopRequested after a stop request, if this thread may stop now.

    The function is fast enough to be called in every micro-batch.
    """
    if _catching and stops_here() and stop_requested():
        raise StopRequested


# -------- The end of a command that does not stop
#
# Python runs a handler only between two lines of Python, and user code may swallow what a handler raises. So each signal is also written
# to a pipe, which the watchdog reads.


class _Arrived:
    """The signals that the watchdog has seen since the start of the outermost `handled_by` block."""

    def __init__(self) -> None:
        self.pipe: tuple[int, int] | None = None
        self.guard = threading.Lock()
        """Lock that is held while the pipe is read or closed, because a new file may immediately receive its descriptor."""
        self.clear()

    def clear(self) -> None:
        """Forget all signals that the watchdog has seen."""
        self.numbers: list[int] = []
        self.waited = 0.0
        """Time in seconds since the command should have stopped."""

    def look(self, passed: float) -> None:
        """Read signals from the pipe, and end the command if its time to stop has passed."""
        with self.guard, suppress(OSError):
            if self.pipe is not None:
                self.numbers += [number for number in os.read(self.pipe[0], 4096) if number in SIGNALS]
        insists = self.numbers.count(signal.SIGINT) > 1
        requests = bool(_catching) and not insists
        if not (self.numbers and commands) or (_unbroken and not insists):
            return
        if requests and {*self.numbers} == {signal.SIGINT}:
            return  # the user can repeat Ctrl-C
        self.waited += passed
        if self.waited > (stop_within() if requests else LAST_RESORT):
            end_process(
                f"The command did not stop in time; it was at: {holder()}. A training run resumes from its last checkpoint.",
                128 + self.numbers[0],
            )


_arrived = _Arrived()


work = "its start"
"""Description of the current work of this process, which `process_tree.doing` sets."""
holder: Callable[[], str] = lambda: work  # noqa: E731 - a variable that `deadlines.py` sets
"""Function that returns the name of the call that is running on the main thread, or else the current work."""


@contextmanager
def _counted() -> Iterator[None]:
    """Let the watchdog see the signals that arrive in the block, unless other code has set a wakeup descriptor."""
    every_tick(_arrived.look)
    _arrived.clear()
    ending.clear()
    try:
        pipe = os.pipe()
    except OSError:  # without a free descriptor, signals are only handled by Python
        yield
        return
    for end in pipe:
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
    if before == -1:
        _arrived.pipe = pipe
    else:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
    try:
        yield
    finally:
        with _arrived.guard:
            if _arrived.pipe == pipe:
                signal.set_wakeup_fd(-1)
                _arrived.pipe = None
            for end in pipe:
                os.close(end)


@contextmanager
def handled_by(receive: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let `receive` handle the signals of this process inside the block.

    Forked child processes are not affected.
    """
    before: dict[int, Any] = {
        number: signal.signal(number, receive)
        for number in SIGNALS
        # `nohup` ignores SIGHUP.
        if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) is not signal.SIG_IGN
    }
    outermost = not _handlers_before
    if outermost:
        _handlers_before.update(before)
    try:
        with _counted() if outermost else nullcontext():
            yield
    finally:
        _restore(before)
        if outermost:
            _handlers_before.clear()


def _restore(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        # None means a handler that was not set by Python and cannot be restored.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _forget() -> None:
    """Let signals end a forked child process instead of requesting a stop."""
    if _arrived.pipe is not None:
        signal.set_wakeup_fd(-1)
    _arrived.pipe, _arrived.guard = None, threading.Lock()
    _arrived.clear()
    _restore(_handlers_before)
    _handlers_before.clear()
    for kept in (_catching, ending, to_notify, _unbroken, _finishing, commands, agreements):
        kept.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def listed(entry: T, entries: list[T]) -> Iterator[None]:
    """Keep an entry in a list while the block runs. A forked child process clears the list."""
    entries.append(entry)
    try:
        yield
    finally:
        with suppress(ValueError):  # this is the child
            entries.remove(entry)


@contextmanager
def unbroken() -> Iterator[None]:
    """Let a block, such as a save, run to its end after a stop request."""
    with listed(object(), _unbroken):
        yield


@contextmanager
def finishing() -> Iterator[None]:
    """Let a step finish after a stop request, until a second Ctrl-C or until the time to stop has passed."""
    with listed(object(), _finishing):
        yield


@contextmanager
def catch_interrupts(notify: Callable[[signal.Signals], None] = lambda _: None) -> Iterator[Interrupts]:
    """Convert SIGINT, SIGTERM and SIGHUP to a stop request inside the block, and restore the signal handlers afterwards.

    The function `notify` is called once in the signal handler, so that the user sees a reaction. Python handles signals only in the
    main thread; in other threads, this context manager has no effect.
    """
    interrupts = Interrupts(notify)
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    stop_within()  # raises here for a wrong value, not in the watchdog
    with handled_by(interrupts.receive):
        try:
            with listed(interrupts, _catching):
                yield interrupts
        finally:
            if not _catching:
                _arrived.clear()
