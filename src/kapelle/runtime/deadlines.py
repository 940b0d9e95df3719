"""Deadlines for other people's code: a call that does not return in time is given up, whatever it is doing.

    answer = call("`task` of environment 'math'", "environment", 600.0, environment.task, split, index)
    reward = await within("Grading an answer", "grader", 1800.0, grade(text))

Both raise GaveUp when the seconds are over; an episode records it as its error. Environments, graders and engines are called on
the thread of the event loop, in a fixed order, so that a run repeats. So the time is kept elsewhere: a watchdog thread
looks at all open calls every `TICK` seconds and ends those that take too long. How depends on what a call does:

    it waits (`await` without end)        its task is cancelled; if it still waits, its coroutine is left behind
    it blocks the loop (`time.sleep`,     a signal is sent to the main thread, whose handler raises GaveUp inside the
      `lock.acquire`, `while True`)         call; again every second while it swallows that
    it cannot be interrupted (C code)     a command ends; what lies on the disk is whole at every moment

The clock stands still while this process is stopped (SIGSTOP, a sleeping laptop), and a call is charged only for its
own time: while one blocks the loop, the others' seconds are not counted, nor is time in which the loop is busy with the
model.
"""

from __future__ import annotations

import _thread
import asyncio
import ctypes
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Generic, NoReturn, TypeVar

from kapelle.runtime import interrupts, machine

T = TypeVar("T")

TICK = 0.1
"""Seconds between two looks of the watchdog."""
PAUSE = 1.0
"""Seconds after which a call that swallowed the exception gets it again. More time than this between two looks means that
the whole process was stopped, and is not counted."""
GRACE = 5.0
"""Seconds that a call which is given up has for cleaning up."""
UNBREAKABLE = 30.0
"""Seconds over its limit after which a blocking call that cannot be interrupted ends the command."""
BREAKER = signal.SIGURG
"""The signal that wakes the main thread; by default it does nothing."""


class GaveUp(BaseException):
    """A call took longer than it may.

    It is not an Exception, so that `except Exception` in the interrupted code does not swallow it.
    """


_LOOP_WORK = frozenset({"engine", "episode"})
"""What the event loop works at. An environment waits beside it, so that a busy loop is not its fault."""


class Limit:
    """The time limit of one call, and the time that it has used."""

    def __init__(self, what: str, kind: str, seconds: float) -> None:
        """Keep what is called, the setting that bounds it (`environment`, …) and for how many seconds it may."""
        self.what, self.kind, self.seconds = what, kind, seconds
        # Every call of an environment comes by here: calls of Python are what it costs, so few are made.
        try:
            watched: WatchedThread = here.watched
        except AttributeError:
            watched = watched_thread()
        self.watched = watched
        self.own = 0.0
        """Seconds counted so far, but for those since `since`."""
        self.since: float | None = watched.awake if kind in _LOOP_WORK else watched.free
        self.stage = 0
        """0 in time, 1 cancelled, 2 its coroutine and 3 its task left behind."""
        self.cancels = 0
        """How often its task was cancelled because it was late."""
        self.interrupted_at = 0.0
        """When GaveUp was last raised in it while it blocked."""
        self.task: asyncio.Task[Any] | None = None
        self.outer: Limit | None = None
        """The limit of the call inside which this one is awaited."""
        self.interrupting = False
        """Whether the exception is on its way into it."""
        self.on_abandoned: Callable[[GaveUp], None] | None = None
        """Ends its episode without its task, where the task does not react to being cancelled."""

    def _clock(self) -> float:
        return self.watched.awake if self.kind in _LOOP_WORK else self.watched.free

    @property
    def used(self) -> float:
        """Seconds used so far."""
        return self.own + (0.0 if self.since is None else self._clock() - self.since)

    def pause(self) -> None:
        """Stop counting, while something inside the call counts for itself."""
        self.own, self.since = self.used, None

    def resume(self) -> None:
        """Count again; does nothing while it is counting."""
        if self.since is None:
            self.since = self._clock()

    def reason(self) -> GaveUp:
        """Return why the call is given up."""
        return GaveUp(f"{self.what} took more than {self.seconds:g} s (`{self.kind}.timeout`).")


class WatchedThread:
    """One thread on which calls with a deadline run, with the event loop that it runs."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.main = self.thread is threading.main_thread()
        self.stops = interrupts.stops_here()
        """Whether it should leave its work when the process is asked to stop."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.running: Limit | None = None
        """The call that computes now."""
        self.serial = 0
        """Counts calls, so that the watchdog can distinguish a call that has not returned from a later one."""
        self.open: set[Limit] = set()
        """Calls that are awaited."""
        self.awake = self.free = 0.0
        """Seconds in which no call blocked this thread; and those of them in which its loop was free."""
        self._seen = (0, 0)
        """The call that ran at the last look and its serial; the number of an object, so that its end is not delayed."""
        self.guard = threading.Lock()
        """Held while a call is interrupted and while one ends, so that no call is interrupted after its end."""
        self.loop_answered = True
        """Whether the loop has run something since the last look: then it is free."""

    def look(self, passed: float) -> None:
        """Count the time since the last look, and end calls that are late; called by the watchdog."""
        running, serial = self.running, self.serial
        blocked = running is not None and (id(running), serial) == self._seen
        self._seen = (id(running), serial)
        stop = interrupts.pending_stop() if self.stops else None
        if blocked:
            assert running is not None
            running.own += passed
            asked = stop is not None and time.monotonic() - stop.since > PAUSE
            if (
                asked or running.used >= running.seconds
            ) and time.monotonic() - running.interrupted_at > PAUSE:
                running.interrupted_at = time.monotonic()
                self._interrupt(running, stop if asked else None)
            if self.main and running.used >= running.seconds + UNBREAKABLE and interrupts.commands:
                _end_process(
                    f"{running.reason()} It runs code that cannot be interrupted. Declare `blocking = True` on its "
                    "environment, and resume the run.",
                    2,
                )
            return
        self.awake += passed
        if self.loop_answered:
            self.free += passed
            if self.loop is not None:
                self.loop_answered = False
                self._in_loop(partial(setattr, self, "loop_answered", True))
        for limit in tuple(self.open):
            loop = None if limit.task is None else limit.task.get_loop()
            if loop is not None and loop.is_closed():
                self.open.discard(limit)
            if loop is self.loop and limit.stage < 3 and limit.used - limit.seconds >= limit.stage * GRACE:
                limit.stage += 1
                self._in_loop(partial(_cancel, limit))

    def _in_loop(self, work: Callable[[], None]) -> None:
        loop = self.loop  # its own thread may take it back at any moment
        if loop is not None:
            try:
                loop.call_soon_threadsafe(work)
            except RuntimeError:  # it was closed in between
                self.loop_answered = True

    def _interrupt(self, running: Limit, stop: interrupts.StopSignal | None) -> None:
        """Raise GaveUp, or what the signal that asks to stop raises, inside the call that blocks this thread."""
        ident = self.thread.ident
        assert ident is not None
        if self.main:
            running.interrupting = True
            signal.pthread_kill(ident, BREAKER)
            return
        with self.guard:
            if (id(self.running), self.serial) == self._seen:
                running.interrupting = True
                raise_in(ident, running.reason() if stop is None else stop.again())


def _cancel(limit: Limit) -> None:
    """Cancel the task of a late call, in its event loop; at the last stage go on without the task."""
    watched = limit.watched
    if limit not in watched.open or limit.task is None or limit.task.get_loop() is not watched.loop:
        return
    if limit.stage < 3:
        limit.cancels += 1
        limit.task.cancel()
    elif limit.on_abandoned is not None:
        watched.open.discard(limit)
        limit.on_abandoned(limit.reason())


def raise_in(thread: int, error: BaseException | None) -> None:
    """Raise an error in a thread, at its next line of Python; None takes back one that was not raised yet."""
    kind = None
    if error is not None:
        made = type(error)
        # Python takes a class and makes the error there, without arguments: so make a class with this message.
        kind = ctypes.py_object(type(made.__name__, (made,), {"__str__": lambda _: str(error)}))
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), kind)


def leave_behind(thing: object) -> None:
    """Keep a coroutine or task that does not end for as long as the process lives.

    Python ends a coroutine without references by raising inside it, in whatever thread that happens; other people's code may
    then compute for ever.
    """
    interrupts.left_behind.append(type(thing).__name__)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _handle_breaker(_number: int, _frame: FrameType | None) -> None:
    """Raise in the call that runs on the main thread, if it is still the one to be interrupted."""
    running = here.watched.running if hasattr(here, "watched") else None
    if running is None or not running.interrupting:
        return
    running.interrupting = False
    stop = interrupts.pending_stop()
    if stop is not None and time.monotonic() - stop.since > PAUSE:
        raise stop.again()
    raise running.reason()


here = threading.local()
"""Holds this thread's WatchedThread as `watched`."""
_watched_threads: dict[WatchedThread, None] = {}
_starting = threading.Lock()
_watchdog: threading.Event | None = None
"""Set by the watchdog's thread once it runs; None before it is started."""
current: ContextVar[Limit | None] = ContextVar("limit", default=None)
"""The limit of the call inside which this code runs; tasks that the call starts have it too."""
on_abandoned: ContextVar[Callable[[GaveUp], None] | None] = ContextVar("on_abandoned", default=None)
"""What ends this task's episode without it; see `gather_abandonable`."""


def watched_thread() -> WatchedThread:
    """Return the record of this thread, and make sure that the watchdog observes it."""
    global _watchdog  # noqa: PLW0603 - there is one
    watched: WatchedThread | None = getattr(here, "watched", None)
    if watched is None:
        watched = here.watched = WatchedThread()
        _watched_threads[watched] = None
        if watched.main and signal.getsignal(BREAKER) in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(BREAKER, _handle_breaker)
        with _starting:
            if _watchdog is None:
                # Not `Thread.start`: without memory that waits for ever, and only the watchdog could see it.
                begun = threading.Event()
                _thread.start_new_thread(_run_watchdog, (begun,))
                if not begun.wait(machine.THREAD_START_S):
                    raise MemoryError
                _watchdog = begun
    return watched


def _run_watchdog(begun: threading.Event) -> None:
    begun.set()
    before, starts = time.monotonic(), machine.ThreadStarts()
    while True:
        time.sleep(TICK)
        now = time.monotonic()
        passed, before = min(now - before, PAUSE), now
        for watched in tuple(_watched_threads):
            if watched.thread.is_alive():
                watched.look(passed)
            else:
                _watched_threads.pop(
                    watched, None
                )  # the record, not the thread's number, which a new one may have
        if starts.lost(passed) and interrupts.commands:
            machine.exit_without_memory()
        # A signal has asked the process to stop, and it does not.
        number, stop = interrupts.Arrivals.look(passed), interrupts.pending_stop()
        if stop is not None:
            if not stop.waited:
                interrupts.end_loops()
            stop.waited += passed
            if number is None and stop.waited > interrupts.LAST_RESORT:
                number = stop.number
        if number is not None and interrupts.commands:
            running = next((watched.running for watched in tuple(_watched_threads) if watched.main), None)
            holds = running.what if running is not None else "something that cannot be interrupted"
            _end_process(
                f"{holds} holds the process; it ends without waiting. What the last checkpoint holds is kept, and what came "
                "after it is done again when the run is resumed.",
                128 + number,
            )


def _end_process(message: str, code: int) -> NoReturn:
    with suppress(OSError, ValueError):
        os.write(2, f"kapelle: {message}\n".encode())
    os._exit(code)


def _forget() -> None:
    global _watchdog, _starting
    _watchdog, _starting = None, threading.Lock()
    _watched_threads.clear()
    if hasattr(here, "watched"):
        del here.watched


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget)


def leave(watched: WatchedThread, before: Limit | None) -> None:
    """End a call that has run on a thread; the call around it, `before`, continues."""
    came: BaseException | None = None
    while True:
        try:
            if watched.main:  # its calls are interrupted on this thread itself, by a signal
                watched.running = before
                watched.serial += 1
                break
            with watched.guard:
                running = watched.running
                if running is not None and running.interrupting:
                    raise_in(watched.thread.ident or 0, None)
                    running.interrupting = False
                watched.running = before
                watched.serial += 1
            break
        except BaseException as error:  # noqa: BLE001 - the call was interrupted just now: raised when it has ended
            came = error
    if came is not None:
        raise came


@dataclass(frozen=True)
class Patience:
    """Total seconds after which something is given up; its episode is then an error."""

    environment: float = 600.0
    """One call of an environment or world: `task`, `start`, `observe`, `step`, `close`, …"""
    episode: float = 14_400.0
    """One episode, from its start to its end."""
    engine: float = 3600.0
    """One request to an engine, from its turn on."""
    grader: float = 1800.0
    """Grading one text; waits for the turn with a sandbox or a connection do not count."""


patience_here: ContextVar[Patience] = ContextVar("patience", default=Patience())  # noqa: B039 - frozen
"""The limits of the episode inside which this code runs."""


def _refuse_when_stopping() -> None:
    """Start nothing new once this process was asked to stop and open calls have had time to end."""
    stop = interrupts.pending_stop()
    if stop is not None and time.monotonic() - stop.since > PAUSE:
        raise stop.again()


def call(what: str, kind: str, seconds: float, work: Callable[..., T], *given: Any) -> T:
    """Call `work` here and now; raises GaveUp inside it, and out of here, when it takes longer than `seconds`.

    `what` begins the message, and `kind` is the settings section with the `timeout` that it names.
    """
    limit = Limit(what, kind, seconds)
    watched = limit.watched
    if watched.stops and interrupts.stops:
        _refuse_when_stopping()
    before, watched.running = watched.running, limit
    watched.serial += 1
    try:
        return work(*given)
    finally:
        leave(watched, before)


def charged_to(limit: Limit, work: Callable[..., T], *given: Any) -> T:
    """Call `work`, a step of a task that a call has started, as part of that call."""
    watched = limit.watched
    if limit.kind in _LOOP_WORK or watched is not getattr(here, "watched", None):
        return work(*given)
    before, watched.running = watched.running, limit
    watched.serial += 1
    try:
        return work(*given)
    finally:
        leave(watched, before)


@contextmanager
def watching_loop(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let the event loop of this thread end calls that wait on it, inside the block."""
    watched = watched_thread()
    before, watched.loop = watched.loop, loop
    try:
        yield
    finally:
        watched.loop = before
        watched.loop_answered = True
        # Those still open belong to tasks that were left behind: nothing can end them any more.
        for limit in tuple(watched.open):
            if limit.task is not None and limit.task.get_loop() is loop:
                watched.open.discard(limit)


def pause_deadline() -> Callable[[], None]:
    """Stop counting the seconds of the call inside which this runs, until what is returned is called.

    For calls that queue for a scarce resource: rows of a model, connections, sandboxes. The time in the queue is not
    the fault of the waiting call, and those ahead of it have limits of their own.
    """
    limit = current.get()
    if limit is None or limit.watched is not watched_thread():
        return lambda: None
    limit.pause()
    return limit.resume


def pause_all_deadlines() -> Callable[[], None]:
    """Stop counting the seconds of every call inside which this runs, until what is returned is called.

    For an episode that waits for an outside program to play it: neither its world's call nor the episode has begun.
    """
    paused: list[Limit] = []
    limit = current.get()
    while limit is not None and limit.watched is watched_thread():
        if limit.since is not None:
            limit.pause()
            paused.append(limit)
        limit = limit.outer

    def resume() -> None:
        for each in paused:
            each.resume()

    return resume


def within(what: str, kind: str, seconds: float, work: Awaitable[T]) -> Bounded[T]:
    """Return `work` to await, which raises GaveUp when it takes longer than `seconds`, waiting and computing together."""
    return Bounded(Limit(what, kind, seconds), work)


class Bounded(Generic[T]):
    """An awaitable around another one that ends in time, even if the other one does not.

    It steps the other one by hand inside the same task, and so adds no turn of the event loop.
    """

    def __init__(self, limit: Limit, work: Awaitable[T]) -> None:
        self._limit, self._work = limit, work

    def __await__(self) -> Generator[Any, Any, T]:
        limit, watched = self._limit, self._limit.watched
        if watched.stops and interrupts.stops:
            try:
                _refuse_when_stopping()
            except BaseException:
                if isinstance(self._work, Coroutine):
                    self._work.close()  # it was never begun
                raise
        task = limit.task = asyncio.current_task()
        if task is not None and watched.loop is not (loop := task.get_loop()):  # `run_async` did not start it
            watched.loop, watched.loop_answered = loop, True
        limit.on_abandoned = on_abandoned.get()
        outer = limit.outer = current.get()
        token = current.set(limit)
        # An environment that has a text graded is not charged for it: grading has a limit of its own.
        pauses = (
            outer if outer is not None and (limit.kind, outer.kind) == ("grader", "environment") else None
        )
        if pauses is not None:
            pauses.pause()
        watched.open.add(limit)
        try:
            steps = self._work.__await__()
            resume: Callable[..., Any] = next
            sent: Any = steps
            while True:
                before, watched.running = watched.running, limit
                watched.serial += 1
                try:
                    waits_for = resume(sent)
                except StopIteration as done:
                    if limit.cancels:
                        self._convert()
                    result: T = done.value
                    return result
                except (Exception, asyncio.CancelledError):
                    if limit.cancels:
                        self._convert()
                    raise
                finally:
                    leave(watched, before)
                try:
                    resume, sent = steps.send, (yield waits_for)
                except BaseException as error:  # noqa: BLE001 - a message for the work, which answers it
                    if limit.cancels > 1:  # it was cancelled before, and waits on
                        leave_behind(self._work)
                        self._convert()
                    resume, sent = steps.throw, error
        finally:
            watched.open.discard(limit)
            try:  # noqa: SIM105 - three calls fewer than `suppress`, for every episode
                current.reset(token)
            except ValueError:  # a coroutine that was left behind ends somewhere else
                pass
            if pauses is not None:
                pauses.resume()

    def _convert(self) -> None:
        """Raise GaveUp where the watchdog has cancelled the call, whatever the call made of that."""
        limit = self._limit
        if limit.cancels and limit.task is not None:
            for _ in range(limit.cancels):
                limit.task.uncancel()
            raise limit.reason() from None


async def gather_abandonable(
    works: Sequence[Callable[[], Coroutine[Any, Any, T]]], without: Callable[[int, GaveUp], T]
) -> list[T]:
    """Run coroutines at once and return their results in order, as `asyncio.gather`.

    One whose task is given up and does not react has the result `without(its place, why)`.
    """
    loop = asyncio.get_running_loop()
    results: list[asyncio.Future[T]] = [loop.create_future() for _ in works]

    async def one(place: int) -> T:
        def end(error: GaveUp) -> None:
            if not results[place].done():
                results[place].set_result(without(place, error))

        on_abandoned.set(end)
        return await works[place]()

    tasks = [loop.create_task(one(place)) for place in range(len(works))]
    for task, result in zip(tasks, results, strict=True):
        task.add_done_callback(partial(_pass_on, result))
    try:
        return list(await asyncio.gather(*results))
    finally:
        for task in tasks:
            task.cancel()


def _pass_on(result: asyncio.Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        result.cancel()
        return
    error = task.exception()
    if result.done():
        return
    if error is None:
        result.set_result(task.result())
    else:
        result.set_exception(error)
