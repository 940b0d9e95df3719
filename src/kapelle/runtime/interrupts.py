"""Stopping on a signal: a step of training ends and is saved, and unfinished work is repeated after a resume.

    with catch_interrupts() as interrupts:      the command: signals become a request to stop
        with finishing(): step()                what ends first
        evaluate()                              what may stop earlier (`stop_if_asked`, `on_stop`): raises StopRequested
        with unbroken(): save()                 what has to run to its end
    sys.exit(interrupts.exit_code)

The first SIGINT (Ctrl-C), SIGTERM or SIGHUP (the terminal is closed) is remembered. The exit code is 128 + its number, as
shells have it: 129 for SIGHUP, 130 for SIGINT, 143 for SIGTERM.

A second Ctrl-C raises KeyboardInterrupt at once; the last checkpoint is then what remains. SIGTERM and SIGHUP do the like
(`Terminated`) when the process has not stopped after `stop_within()` seconds. A command that does not end by this exception ends
`LAST_RESORT` seconds later: the files on the disk are complete at every moment. A process that is not a command of ours (a
notebook) is never ended.
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
from kapelle.runtime.watchdog import end_process, every_tick

T = TypeVar("T")

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that ask a process to stop; Windows has no SIGHUP."""

commands: list[object] = []
"""Not empty while this process is a command of ours, which the watchdog may end."""

left_behind: list[object] = []
"""Coroutines, tasks and threads that this process gave up and could not end; some may still run when it ends.

They are kept: Python ends a coroutine without references by raising inside it, in whatever thread that happens, and other people's
code may then compute for ever.
"""

LAST_RESORT = 5.0
"""Seconds from the exception that ends a process to the end of one that does not end by it."""

FINISHING = 5.0
"""Seconds that a step may still take after SIGTERM or SIGHUP: whoever sends them rarely waits for long."""
STOP_WITHIN = "KAPELLE_STOP_WITHIN"
"""Environment variable with other seconds than `FINISHING`, for schedulers that wait longer."""


class StopRequested(BaseException):
    """Leaves the current work because this process was asked to stop."""


class Terminated(KeyboardInterrupt):
    """SIGTERM has arrived."""

    number = 15


class HungUp(Terminated):
    """SIGHUP has arrived: the terminal was closed."""

    number = 1


def ending_by(number: int) -> KeyboardInterrupt:
    """Return the exception that ends this process by a signal, and note it in `endings`."""
    kinds = {kind.number: kind for kind in (HungUp, Terminated)}
    endings.append(kinds.get(number, KeyboardInterrupt)())
    return endings[-1]


endings: list[KeyboardInterrupt] = []
"""What was raised to end this process."""


class Interrupts:
    """Whether this process was asked to stop, and by which signal."""

    def __init__(self, notify: Callable[[signal.Signals], None]) -> None:
        self.received: signal.Signals | None = None
        """The first signal that asked; None before."""
        self._notify = notify

    @property
    def exit_code(self) -> int:
        """128 + the number of the signal that asked; 0 before."""
        return 0 if self.received is None else 128 + self.received

    def receive(self, number: int, _frame: FrameType | None = None) -> None:
        """Remember a signal; raises KeyboardInterrupt for a second Ctrl-C, and when the time to stop is over."""
        hung_up(number)
        first = self.received is None
        if first:
            self.received = signal.Signals(number)
            self._notify(self.received)
            if stop_asked():
                for notify in tuple(_to_notify):
                    notify()
        if _arrived.late or (number == signal.SIGINT and not first):
            raise ending_by(number)


def hung_up(number: int) -> None:
    """On SIGHUP, discard what is printed from now on: a closed terminal refuses it, which would look like a full disk."""
    if number == getattr(signal, "SIGHUP", None):
        for stream in (1, 2):
            with suppress(OSError):
                if gone_terminal(stream):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, stream)
                    os.close(nowhere)


def gone_terminal(descriptor: int) -> bool:
    """Return whether a descriptor leads to a terminal that is closed."""
    found, nowhere = os.fstat(descriptor), Path(os.devnull).stat()
    return stat.S_ISCHR(found.st_mode) and found.st_rdev != nowhere.st_rdev and not os.isatty(descriptor)


_catching: list[Interrupts] = []
"""One for each `catch_interrupts` that is open, the outermost first."""
_to_notify: list[Callable[[], None]] = []
"""What `on_stop` is to call."""
_unbroken: list[object] = []
"""One for each `unbroken` block that runs."""
_finishing: list[object] = []
"""One for each `finishing` block that runs."""
agreements: list[Agreement] = []
"""Not empty while this process is one of several ranks, which stop together."""
_handlers_before: dict[int, Any] = {}
"""What handled the signals before the outermost `catch_interrupts` or command did, and handles them in a forked child."""


class Agreement:
    """When the ranks of a run stop: all at once, at their next exchange (`ranks.py`).

    Until then a signal that one of them got counts only inside the share of the work that it does alone.
    """

    def __init__(self) -> None:
        self.reached = False
        """Whether the ranks have agreed to stop."""
        self.apart = False
        """Whether this process is doing its own share of the work."""

    def meet(self, asked: int) -> None:
        """Take what the exchange has brought: the signal that one of the ranks was sent, or 0."""
        self.reached = bool(asked)
        if asked:
            for each in _catching:
                if each.received is None:
                    each.receive(asked)


def asked_by() -> int:
    """Return the number of the first signal that asked code inside `catch_interrupts` to stop, or 0."""
    return next((int(each.received) for each in _catching if each.received is not None), 0)


def _held_back() -> bool:
    """Return whether this rank has to wait with stopping until all ranks have agreed on it."""
    return bool(_catching) and any(not each.reached and not each.apart for each in agreements)


def stop_within() -> float:
    """Return for how many seconds after SIGTERM or SIGHUP a step may still finish; ConfigError for anything but a number."""
    said = os.environ.get(STOP_WITHIN, "")
    try:
        seconds = float(said) if said else FINISHING
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ConfigError(
            f"{STOP_WITHIN} is {said!r}. Give it the seconds that a step may still take after SIGTERM, such as 60."
        )
    return seconds


def stop_asked() -> bool:
    """Return whether code inside `catch_interrupts` should stop now."""
    return bool(asked_by()) and not (_finishing or _unbroken or _held_back())


_here = threading.local()
"""`waited_for` is set on a thread that the main thread waits for."""


def stops_here() -> bool:
    """Return whether a request to stop is meant for this thread: the main one, or one for which that one only waits."""
    return hasattr(_here, "waited_for") or threading.current_thread() is threading.main_thread()


def waited_for() -> None:
    """Note that the main thread waits for this one, which a request to stop then ends."""
    _here.waited_for = True


def stop_if_asked() -> None:
    """Raise StopRequested if this process was asked to stop and may stop here; cheap enough for every micro-batch."""
    if _catching and stops_here() and stop_asked():
        raise StopRequested


# -------- The end of a process that does not stop
#
# Python runs a handler only between two lines of Python, and other people's code may swallow what a handler raises. The kernel also
# writes each signal to a pipe, which the watchdog reads.


class _Arrived:
    """The signals that have arrived inside the outermost `handled_by`, as the watchdog sees them."""

    def __init__(self) -> None:
        self.pipe: tuple[int, int] | None = None
        self.guard = threading.Lock()
        """Held while the pipe is read and while it is closed: a new file could have its number right after that."""
        self.clear()

    def clear(self) -> None:
        """Forget the signals."""
        self.numbers: list[int] = []
        self.waited = 0.0
        """Seconds since the first of them, without those of `unbroken` blocks."""
        self.late = False
        """Whether the time to stop is over."""

    def look(self, passed: float) -> None:
        """Read the pipe; end a process that has no time left."""
        with self.guard, suppress(OSError):
            if self.pipe is not None:
                self.numbers += [number for number in os.read(self.pipe[0], 4096) if number in SIGNALS]
        if not self.numbers or _unbroken:
            return
        number = self.numbers[0]
        if not _catching or self.numbers.count(signal.SIGINT) > 1:
            limit = 0.0
        elif {*self.numbers} == {signal.SIGINT}:
            return  # a person waits, and can press it again
        else:
            limit = stop_within()
        self.waited += passed
        if self.waited > limit and not self.late:
            self.late, self.waited = True, limit
            if _catching and not endings:  # let the handler raise
                signal.pthread_kill(threading.main_thread().ident or 0, number)
        elif self.waited > limit + LAST_RESORT and commands:
            end_process(
                f"{holder()} holds the process; it ends without waiting. What the last checkpoint holds is kept, and what "
                "came after it is done again when the run is resumed.",
                128 + number,
            )


_arrived = _Arrived()


def _something() -> str:
    return "something that cannot be interrupted"


holder: Callable[[], str] = _something
"""Names what the main thread computes (`deadlines.py`)."""


@contextmanager
def _counted() -> Iterator[None]:
    """Let the watchdog see the signals that arrive inside the block, unless other code reads them from a descriptor of its own."""
    every_tick(_arrived.look)
    _arrived.clear()
    endings.clear()
    try:
        pipe = os.pipe()
    except OSError:  # no descriptor is left: signals are still handled
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
    """Let `receive` handle the signals of this process, and of none that it forks, inside the block."""
    before: dict[int, Any] = {
        number: signal.signal(number, receive)
        for number in SIGNALS
        # `nohup` has the closed terminal ignored.
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
        # None stands for a handler that was not set from Python and cannot be set from here.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _forget() -> None:
    """Leave a forked child its own signals: they end it, and ask neither it nor this process to stop."""
    if _arrived.pipe is not None:
        signal.set_wakeup_fd(-1)
    _arrived.pipe, _arrived.guard = None, threading.Lock()
    _arrived.clear()
    _restore(_handlers_before)
    for kept in (
        _handlers_before,
        _catching,
        endings,
        _to_notify,
        _unbroken,
        _finishing,
        commands,
        agreements,
    ):
        kept.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def on_stop(notify: Callable[[], None]) -> Iterator[None]:
    """Call `notify`, inside the signal handler, when this process is to stop while the block runs."""
    with listed(notify, _to_notify):
        yield


@contextmanager
def listed(entry: T, entries: list[T]) -> Iterator[None]:
    """Keep an entry in one of the lists that a forked child forgets, while the block runs."""
    entries.append(entry)
    try:
        yield
    finally:
        with suppress(ValueError):  # this is the child
            entries.remove(entry)


@contextmanager
def unbroken() -> Iterator[None]:
    """Let a block run to its end even if this process is asked to stop: a save, or what could not be undone."""
    this = object()
    _unbroken.append(this)  # a list and no counter: two threads can append at once
    try:
        yield
    finally:
        with suppress(ValueError):  # a forked child has forgotten it
            _unbroken.remove(this)


@contextmanager
def finishing() -> Iterator[None]:
    """Let a step finish although this process was asked to stop, unless it is asked twice or has no time left."""
    with listed(object(), _finishing):
        yield


@contextmanager
def catch_interrupts(notify: Callable[[signal.Signals], None] = lambda _: None) -> Iterator[Interrupts]:
    """Turn SIGINT, SIGTERM and SIGHUP into a flag inside the block and restore the handlers after it.

    `notify` is called once, inside the signal handler, so that people see that the request has arrived.
    Python handles signals in the main thread only: in any other thread the flag stays unset, and the code that
    started the thread decides.
    """
    interrupts = Interrupts(notify)
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    stop_within()  # raises here for a wrong value, not in the watchdog
    with handled_by(interrupts.receive):
        _catching.append(interrupts)
        try:
            yield interrupts
        finally:
            with suppress(ValueError):  # a forked child has forgotten it
                _catching.remove(interrupts)
            if not _catching:
                _arrived.clear()
