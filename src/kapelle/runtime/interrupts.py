"""Stopping on a signal: the process ends within seconds, and unfinished work is repeated after a resume.

    with catch_interrupts() as interrupts:      the command: signals become a request to stop
        ...
            stop_if_asked()                     long work, between micro-batches: raises StopRequested
            with unbroken(): save()             what has to run to its end
    sys.exit(interrupts.exit_code)

The first SIGINT (Ctrl-C), SIGTERM or SIGHUP (the terminal is closed) is remembered. Long work asks for it
(`stop_if_asked`) or is notified (`on_stop`, an event loop), and leaves by StopRequested; the trainer undoes the step,
saves, and exits with 128 + the signal's number, as shells do:

    129  SIGHUP, after the checkpoint
    130  SIGINT, after the checkpoint
    143  SIGTERM, after the checkpoint

A second Ctrl-C raises KeyboardInterrupt at once; the last checkpoint is then what remains. Where code that cannot be
interrupted holds the main thread, the watchdog (`deadlines.py`) ends a command after `LAST_RESORT` seconds: the files on the
disk are complete at every moment. A process that is not a command of ours (a notebook) is never ended.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from kapelle.errors import ConfigError

T = TypeVar("T")

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that ask a process to stop; Windows has no SIGHUP."""

commands: list[object] = []
"""Not empty while this process is a command of ours, which the watchdog may end."""

left_behind: deque[str] = deque(maxlen=1000)
"""Types of the coroutines and tasks that this process gave up and could not end; some may still run when it ends."""

LAST_RESORT = 8.0
"""Seconds from a signal to the end of a process that does not stop its work."""

FINISHING = 6.0
"""Seconds that a step may still take after SIGTERM or SIGHUP: whoever sends them rarely waits for long."""
STOP_WITHIN = "KAPELLE_STOP_WITHIN"
"""Environment variable with other seconds than `FINISHING`, for schedulers that wait longer."""


class StopRequested(BaseException):
    """Leaves the current work because this process was asked to stop."""


class StopSignal:
    """A signal that has asked this process to stop, while the process is stopping."""

    def __init__(self, number: int, again: Callable[[], BaseException]) -> None:
        """Keep what to raise, again and again, in other people's code that does not return."""
        self.number = number
        self.again = again
        self.at_once = False
        """Whether it ends a step before the step's end: a person has pressed Ctrl-C twice."""
        self.since = time.monotonic()
        self.waited = 0.0
        """Seconds that the watchdog has counted since, those of a save left out."""


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
        """Remember a signal; raises KeyboardInterrupt for a Ctrl-C that was not the first to ask."""
        Arrivals.handled = True
        hung_up(number)
        if self.received is None:
            self.received = signal.Signals(number)
            begin_stop(number, StopRequested)
            self._notify(self.received)
            end_loops()
        elif number == signal.SIGINT:
            for stop in stops:
                stop.at_once = True
            raise KeyboardInterrupt


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


stops: list[StopSignal] = []
"""The signals on which this process is stopping, oldest first."""
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


def begin_stop(number: int, again: Callable[[], BaseException]) -> None:
    """Note that a signal asks this process to stop from now on; `again` makes the error that ends other people's code."""
    stops.append(StopSignal(number, again))


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


def pending_stop() -> StopSignal | None:
    """Return the signal on which this process is stopping; None without one, and inside a block that runs to its end."""
    if not stops or _unbroken or _held_back() or (_finishing and not _overdue(stops[0])):
        return None
    return stops[0]


def end_loops() -> None:
    """Call what `on_stop` is to call, if this process is to stop now."""
    if pending_stop() is not None:
        for notify in tuple(_to_notify):
            notify()


def _overdue(stop: StopSignal) -> bool:
    """Return whether a step has to stop before its end."""
    late = stop.number != signal.SIGINT and time.monotonic() - stop.since > stop_within()
    return stop.at_once or late


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


def end_stops(first: int = 0) -> None:
    """Forget the stops that `begin_stop` began, except the `first` ones."""
    del stops[first:]


def stop_asked() -> bool:
    """Return whether code inside `catch_interrupts` should stop now."""
    return bool(asked_by()) and pending_stop() is not None


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


class Arrivals:
    """Signals that have arrived at this process, counted also while its main thread runs C code.

    Python runs a handler only between two lines of Python. A descriptor that the kernel writes to tells the watchdog of a
    signal before that, so that it can end a command whose main thread never comes back.
    """

    number = 0
    """The last signal that arrived."""
    handled = False
    """Whether a handler has run since the last look; for all signals at once, as those that arrive during one call of C code
    are handled once."""
    waited = 0.0
    """Seconds since one has arrived that is not handled, those of a save left out."""
    _open = False
    """Whether one has arrived and is not handled."""
    _reads: int | None = None
    _writes: int | None = None
    _guard = threading.Lock()
    """Held while the pipe is read and while it is closed: a new file could have its number right after that."""

    @classmethod
    def look(cls, passed: float) -> int | None:
        """Count what has arrived; return the number of a signal that was not handled for `LAST_RESORT` seconds."""
        # In this order: a handler that runs before the pipe is read is then seen by the next look.
        handled, cls.handled = cls.handled, False
        came: list[int] = []
        with cls._guard, suppress(OSError):
            if cls._reads is None:
                return None
            came = [number for number in os.read(cls._reads, 4096) if number in SIGNALS]
        if came:
            cls.number = came[-1]
        cls._open = not handled and (cls._open or bool(came))
        if not cls._open:
            cls.waited = 0.0
        elif not _unbroken:
            cls.waited += passed
        return cls.number if cls.waited > LAST_RESORT else None

    @classmethod
    @contextmanager
    def counted(cls) -> Iterator[None]:
        """Count inside the block.

        Does nothing inside another such block, where other code has set a wakeup descriptor, and where no descriptor is left:
        signals are still handled then, but one that is not goes unseen.
        """
        try:
            ends = os.pipe() if cls._reads is None else None
        except OSError:
            ends = None
        if ends is None:
            yield
            return
        reads, writes = ends
        os.set_blocking(reads, False)
        os.set_blocking(writes, False)
        before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        if before == -1:
            cls.handled, cls._open, cls.waited = False, False, 0.0
            cls._reads, cls._writes = reads, writes
        else:
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        try:
            yield
        finally:
            with cls._guard:
                counts, cls._reads, cls._writes = cls._writes == writes, None, None
                if counts:
                    signal.set_wakeup_fd(-1)
                os.close(reads)
            os.close(writes)

    @classmethod
    def forget(cls) -> None:
        """Stop counting, in a forked child: what arrives there has not arrived here."""
        if cls._writes is not None:
            writes = signal.set_wakeup_fd(-1)
            if writes not in (-1, cls._writes):
                signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        cls._reads = cls._writes = None
        cls._guard = threading.Lock()  # the other may have been held when this process was forked
        cls.handled, cls._open, cls.waited = False, False, 0.0


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
        with Arrivals.counted():
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
    Arrivals.forget()
    _restore(_handlers_before)
    for kept in (_handlers_before, _catching, stops, _to_notify, _unbroken, _finishing, commands, agreements):
        kept.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def on_stop(notify: Callable[[], None]) -> Iterator[None]:
    """Call `notify`, inside the signal handler or from the watchdog, when this process is to stop while the block runs."""
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
    first = len(stops)
    with handled_by(interrupts.receive):
        _catching.append(interrupts)
        try:
            yield interrupts
        finally:
            with suppress(ValueError):  # a forked child has forgotten it
                _catching.remove(interrupts)
            end_stops(first)
