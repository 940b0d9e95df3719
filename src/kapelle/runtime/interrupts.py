"""Stopping: a signal becomes a request to stop, met within seconds; unfinished work is repeated after a resume.

The first SIGINT (Ctrl-C), SIGTERM or SIGHUP (the terminal is closed) is remembered. Long work checks for it (`stop_if_asked`, between micro-batches) or
is notified (`on_stop`, an event loop), and leaves by StopRequested; the trainer undoes the step, saves, and exits with
128 + the signal's number, as shells do:

    129  SIGHUP, after the checkpoint
    130  SIGINT, after the checkpoint
    143  SIGTERM, after the checkpoint

A second Ctrl-C raises KeyboardInterrupt at once; the last checkpoint is then what remains. Where none of this works,
because code that cannot be interrupted holds the main thread, a command ends by itself after `LAST_RESORT` seconds
(`watchdog.py`): the files on the disk are complete at every moment. A process that is not a command of ours (a notebook)
is never ended.
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

T = TypeVar("T")

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Those that ask; Windows has no SIGHUP."""

commands: list[object] = []
"""Holds something while this process is a command of its own, which may end it."""

left_behind: deque[str] = deque(maxlen=1000)
"""What this process has given up and could not end; it may still be there when the process wants to end."""

LAST_RESORT = 8.0
"""Seconds from a signal to the end of a process that does not stop its work."""


class StopRequested(BaseException):
    """The current work is broken off because this process was asked to stop."""


class StopSignal:
    """A signal that has asked this process to stop and is being acted on."""

    def __init__(self, number: int, again: Callable[[], BaseException]) -> None:
        """Keep what to raise in foreign code that does not return (`again`)."""
        self.number = number
        self.again = again
        self.since = time.monotonic()
        self.waited = 0.0
        """Seconds that the watchdog has counted since; those of a save are left out."""


class Interrupts:
    """Whether somebody asked this process to stop."""

    def __init__(self, notify: Callable[[signal.Signals], None]) -> None:
        self.received: signal.Signals | None = None
        """The first signal that asked, None while nobody did."""
        self._notify = notify

    @property
    def exit_code(self) -> int:
        """0 while nobody asked, else the documented code of the signal that did."""
        return 0 if self.received is None else 128 + self.received

    def receive(self, number: int, _frame: FrameType | None = None) -> None:
        """Remember a signal; raises KeyboardInterrupt for a Ctrl-C that was not the first to ask."""
        Arrivals.handled = True
        hung_up(number)
        if self.received is None:
            self.received = signal.Signals(number)
            begin_stop(number, StopRequested)
            self._notify(self.received)
            for notify in tuple(_to_notify):
                notify()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


def hung_up(number: int) -> None:
    """On SIGHUP, have what is printed from now on go nowhere: a terminal that is closed refuses it, which looks like a full disk."""
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


_stops: list[StopSignal] = []
"""The signals that are being acted on, the first one first."""
_catching: list[Interrupts] = []
_to_notify: list[Callable[[], None]] = []
_unbroken: list[object] = []
"""Holds something for every block that may not be broken off."""
agreements: list[Agreement] = []
"""Holds one while this process must not stop by itself."""
_foreign: dict[int, Any] = {}
"""What handled the signals before the outermost `catch_interrupts` or command did, and handles them in a forked child."""


def begin_stop(number: int, again: Callable[[], BaseException]) -> None:
    """Note that a signal asks this process to stop, from this moment on; `again` makes what foreign code is ended by."""
    _stops.append(StopSignal(number, again))


class Agreement:
    """When processes that do the same work stop: all at once, where they meet (`ranks.py`).

    Until they have met, a signal counts only inside the work that a process does for itself.
    """

    def __init__(self) -> None:
        self.reached = False
        """Whether they have agreed to stop."""
        self.apart = False
        """Whether this process is doing its own share of the work."""

    def meet(self, asked: int) -> None:
        """Take what they have found out together: the signal that some of them was sent, or 0."""
        self.reached = bool(asked)
        if asked:
            for each in _catching:
                if each.received is None:
                    each.receive(asked)


def asked_by() -> int:
    """Return the number of the first signal that asked code inside `catch_interrupts` to stop, or 0."""
    return next((int(each.received) for each in _catching if each.received is not None), 0)


def _held_back() -> bool:
    return bool(_catching) and any(not each.reached and not each.apart for each in agreements)


def pending_stop() -> StopSignal | None:
    """Return the signal that is being acted on now; None without one, and where nothing may be broken off."""
    return _stops[0] if _stops and not _unbroken and not _held_back() else None


def end_stops(first: int = 0) -> None:
    """Forget the stops that `begin_stop` began, except the `first` ones: they have been acted on."""
    del _stops[first:]


def stop_asked() -> bool:
    """Return whether code inside `catch_interrupts` should stop now."""
    return not _unbroken and bool(asked_by()) and not _held_back()


class _Here(threading.local):
    waited_for = False


_here = _Here()


def stops_here() -> bool:
    """Return whether a stop means this thread: the main one, or one that it waits for and does nothing meanwhile."""
    return _here.waited_for or threading.current_thread() is threading.main_thread()


def waited_for() -> None:
    """Note that the main thread waits for this one, to whose end a stop then leads."""
    _here.waited_for = True


def stop_if_asked() -> None:
    """Raise StopRequested where somebody has asked and it may be broken off; cheap enough for every micro-batch."""
    if _catching and stops_here() and stop_asked():
        raise StopRequested


class Arrivals:
    """Signals that have arrived at this process, counted also while its main thread runs nothing of Python."""

    number = 0
    """The last one that arrived."""
    handled = False
    """Whether a handler has run since the last look. It stands for all that had arrived: signals that meet one call of
    C code are handled once."""
    waited = 0.0
    """Seconds for which one has arrived and is not handled; those of a save are left out."""
    _open = False
    """Whether one has arrived and is not handled."""
    _reads: int | None = None
    _writes: int | None = None
    _guard = threading.Lock()
    """Held while the pipe is read and while it is closed, so that nothing else is read that has its number by then."""

    @classmethod
    def look(cls, passed: float) -> int | None:
        """Count what has arrived; return the number of a signal that nobody has handled for `LAST_RESORT` seconds."""
        # Asked before the pipe is read: a handler that runs in between is seen by the next look.
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
        """Count inside the block; one that is inside another, or where somebody else counts, does nothing.

        Nor does one where no descriptor is left: what arrives is still handled, but nobody sees when it is not.
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
        """Count no more, in a forked child: what arrives there has not arrived here."""
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
    outermost = not _foreign
    if outermost:
        _foreign.update(before)
    try:
        with Arrivals.counted():
            yield
    finally:
        for number, handler in before.items():
            _give_to(number, handler)
        if outermost:
            _foreign.clear()


def _give_to(number: int, handler: Any) -> None:
    # None stands for a handler that was not set from Python and cannot be set from here.
    signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _forget() -> None:
    """Leave a forked child its own signals: who ends it does not ask this process, and it does not ask for itself."""
    Arrivals.forget()
    for number, handler in _foreign.items():
        _give_to(number, handler)
    for kept in (_foreign, _catching, _stops, _to_notify, _unbroken, commands, agreements):
        kept.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def on_stop(notify: Callable[[], None]) -> Iterator[None]:
    """Call `notify`, inside a signal handler, when somebody asks while the block runs."""
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
    """Let a block run to its end whoever asks, as long as it takes: a save, or what could not be taken back."""
    this = object()
    _unbroken.append(this)  # at once, whatever other threads do: no count that two of them could change
    try:
        yield
    finally:
        with suppress(ValueError):  # a forked child has forgotten it
            _unbroken.remove(this)


def _ignore(_received: signal.Signals) -> None:
    return None


@contextmanager
def catch_interrupts(notify: Callable[[signal.Signals], None] = _ignore) -> Iterator[Interrupts]:
    """Turn SIGINT, SIGTERM and SIGHUP into a flag inside the block and restore the handlers after it.

    `notify` is called once, inside the signal handler, so that people see that the request has arrived.
    Python handles signals in the main thread only: in any other one the flag stays unset, and who
    started the thread decides.
    """
    interrupts = Interrupts(notify)
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    stops = len(_stops)
    with handled_by(interrupts.receive):
        _catching.append(interrupts)
        try:
            yield interrupts
        finally:
            with suppress(ValueError):  # a forked child has forgotten it
                _catching.remove(interrupts)
            end_stops(stops)
