"""Deadlines for other people's code: a call that does not return in time is given up.

    answer = call("`task` of environment 'math'", "environment", 600.0, environment.task, split, index)
    reward = await within("Grading an answer", "grader", 1800.0, grade(text))

Both raise GaveUp when the seconds are over; an episode records it as its error. Environments, graders and engines are called on
the thread of the event loop, in a fixed order, so that a run repeats; on another thread, code that needs the main one would
fail (`signal.alarm`, connections to SQLite). What ends a call depends on what it does:

    it waits (`await` without end)          its task is cancelled, again after `GRACE` seconds, and then left behind with its episode
    it blocks the main thread               a signal's handler raises GaveUp inside the call; again every second while it swallows that
      (`time.sleep`, `while True`)
    it blocks in C code, or another thread  a command ends; what lies on the disk is whole at every moment

An environment that declares `blocking = True` is called on threads of its own (`rollout/bounded_worlds.py`), which are left behind.

A call is charged only for its own time. The clock of an event loop stands still while something blocks the loop, and while this
process is stopped (SIGSTOP, a sleeping laptop).
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from kapelle.runtime import interrupts, machine
from kapelle.runtime.watchdog import TICK, end_process, every_tick

T = TypeVar("T")

PAUSE = 1.0
"""Seconds after which a call that swallowed the exception gets it again."""
GRACE = 5.0
"""Seconds that a task which is cancelled has for cleaning up."""
UNBREAKABLE = 30.0
"""Seconds over its limit after which a call that cannot be interrupted ends the command."""
BREAKER = signal.SIGURG
"""The signal that wakes the main thread; by default it does nothing."""


class GaveUp(BaseException):
    """A call took longer than it may.

    It is not an Exception, so that `except Exception` in the interrupted code does not swallow it.
    """


_LOOP_WORK = frozenset({"engine", "episode"})
"""What the event loop works at: it may block the loop."""


class Limit:
    """The time limit of one call, and the time that it has used."""

    def __init__(self, what: str, kind: str, seconds: float, clock: LoopClock | None = None) -> None:
        """Keep what is called, the setting that bounds it (`environment`, …), for how many seconds it may, and what counts them."""
        self.what, self.kind, self.seconds, self.clock = what, kind, seconds, clock
        self.own = 0.0
        """Seconds counted so far, but for those since `since`."""
        self.since = None if clock is None else clock.seconds
        self.interrupted_at = 0.0
        """When GaveUp was last raised in it while it blocked."""
        self.cancels = 0
        """How often its task was cancelled because it was late."""
        self.task: asyncio.Task[Any] | None = None
        self.outer: Limit | None = None
        """The limit of the call inside which this one is awaited."""
        self.on_abandoned: Callable[[GaveUp], None] | None = None
        """Ends its episode without its task, where the task does not react to being cancelled."""

    @property
    def used(self) -> float:
        """Seconds used so far."""
        return self.own + (self.clock.seconds - self.since if self.clock and self.since is not None else 0.0)

    def pause(self) -> None:
        """Stop counting, while something inside the call counts for itself."""
        self.own, self.since = self.used, None

    def resume(self) -> None:
        """Count again; does nothing while it is counting."""
        if self.since is None and self.clock is not None:
            self.since = self.clock.seconds

    def reason(self) -> GaveUp:
        """Return why the call is given up."""
        return GaveUp(f"{self.what} took more than {self.seconds:g} s (`{self.kind}.timeout`).")

    def raise_if_late(self) -> None:
        """Raise GaveUp where the task was cancelled, whatever the call has made of that."""
        if self.cancels and self.task is not None:
            for _ in range(self.cancels):
                self.task.uncancel()
            raise self.reason() from None

    def end(self) -> None:
        """Cancel the task of this call, which is late; the third time, continue without the task."""
        assert self.task is not None, "a call that is awaited has a task"
        if self.cancels < 2:
            self.cancels += 1
            self.task.cancel()
        elif self.on_abandoned is not None:
            self.on_abandoned(self.reason())
            self.on_abandoned = None


# -------- Calls that wait: the event loop counts the seconds in which it is free, and cancels those that are late


class LoopClock:
    """Counts the seconds in which an event loop is free, while calls wait on it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.open: set[Limit] = set()
        """Calls that are awaited."""
        self.ticks = False
        """Whether it looks at them."""
        self._before = 0.0

    def begin(self) -> None:
        """Look at the calls from now on, until none is `open`."""
        self.ticks, self._before = True, time.monotonic()
        asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        # More than two ticks: something has blocked the loop, or this process was stopped.
        self.seconds += min(now - self._before, 2 * TICK)
        self._before, self.ticks = now, bool(self.open)
        for limit in tuple(self.open):
            if limit.used - limit.seconds >= limit.cancels * GRACE:
                limit.end()
        if self.ticks:
            asyncio.get_running_loop().call_later(TICK, self._tick)


_clocks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopClock] = weakref.WeakKeyDictionary()


def _clock_here() -> LoopClock | None:
    """Return the clock of the event loop that runs on this thread; None without one."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return _clocks.get(loop) or _clocks.setdefault(loop, LoopClock())


# -------- Calls that block: the watchdog sees that a thread computes the same call for too long


class _Lane:
    """One thread on which other people's code computes."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.main = self.thread is threading.main_thread()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop that `run_async` runs here."""
        self.clock: LoopClock | None = None
        """Its clock."""
        self.running: Limit | None = None
        """The call that computes now."""
        self.serial = 0
        """Counts calls, so that the watchdog can distinguish a call that has not returned from a later one."""
        self.seen = -1
        self.interrupting = False
        """Whether the signal that ends `running` is on its way."""

    def look(self, passed: float) -> None:
        """Charge the call that blocks this thread since the last look, and end it if it is late; called by the watchdog."""
        running, serial = self.running, self.serial
        blocks, self.seen = serial == self.seen, serial
        if running is None or not blocks:
            return
        running.own += passed
        late = running.used - running.seconds
        if self.main and late >= 0.0 and time.monotonic() - running.interrupted_at > PAUSE:
            running.interrupted_at, self.interrupting = time.monotonic(), True
            signal.pthread_kill(self.thread.ident or 0, BREAKER)
        if late >= UNBREAKABLE and interrupts.commands:
            end_process(
                f"{running.reason()} It runs code that cannot be interrupted. Declare `blocking = True` on its environment, and "
                "resume the run.",
                2,
            )


def _handle_breaker(_number: int, _frame: FrameType | None) -> None:
    """Raise in the call that runs on the main thread, if it is still the one to be interrupted."""
    lane = _lane()
    if lane.running is not None and lane.interrupting and lane.running.used >= lane.running.seconds:
        lane.interrupting = False
        raise lane.running.reason()


_here = threading.local()
"""Holds this thread's _Lane as `lane`."""
_lanes: dict[_Lane, None] = {}
_starts = machine.ThreadStarts()
current: ContextVar[Limit | None] = ContextVar("limit", default=None)
"""The limit of the call inside which this code runs; tasks that the call starts have it too."""
on_abandoned: ContextVar[Callable[[GaveUp], None] | None] = ContextVar("on_abandoned", default=None)
"""What ends this task's episode without it; see `gather_abandonable`."""


def _lane() -> _Lane:
    """Return the record of this thread, and make sure that the watchdog observes it."""
    lane: _Lane | None = getattr(_here, "lane", None)
    if lane is None:
        lane = _here.lane = _Lane()
        _lanes[lane] = None
        if lane.main:
            interrupts.holder = partial(_computes, lane)
            if signal.getsignal(BREAKER) in (signal.SIG_DFL, signal.SIG_IGN):
                signal.signal(BREAKER, _handle_breaker)
        every_tick(_look)
    return lane


def _computes(lane: _Lane) -> str:
    return lane.running.what if lane.running is not None else "something that cannot be interrupted"


def _look(passed: float) -> None:
    for lane in tuple(_lanes):
        if lane.thread.is_alive():
            lane.look(passed)
        else:
            _lanes.pop(lane, None)
    if _starts.lost(passed) and interrupts.commands:
        machine.exit_without_memory()


def _forget() -> None:
    _lanes.clear()
    if hasattr(_here, "lane"):
        del _here.lane


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget)


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


def call(what: str, kind: str, seconds: float, work: Callable[..., T], *given: Any) -> T:
    """Call `work` here and now; raises GaveUp inside it, and out of here, when it takes longer than `seconds`.

    `what` begins the message, and `kind` is the settings section with the `timeout` that it names.
    """
    # Every call of an environment comes by here: calls of Python are what it costs, so few are made.
    try:
        lane: _Lane = _here.lane
    except AttributeError:
        lane = _lane()
    before, lane.running = lane.running, Limit(what, kind, seconds)
    lane.serial += 1
    try:
        return work(*given)
    finally:
        _leave(lane, before)


def _leave(lane: _Lane, before: Limit | None) -> None:
    """End a call, also where GaveUp is raised just now; the call around it, `before`, continues."""
    late: GaveUp | None = None
    while True:
        try:
            lane.running = before
            lane.serial += 1
            break
        except GaveUp as error:
            late = error
    if late is not None:
        raise late


def charged_to(limit: Limit | None, work: Callable[..., T], *given: Any) -> T:
    """Call `work`, a step of a task, as part of the call that has started the task."""
    lane: _Lane = _here.lane
    before, lane.running = lane.running, None if limit is None or limit.kind in _LOOP_WORK else limit
    lane.serial += 1
    try:
        return work(*given)
    finally:
        _leave(lane, before)


@contextmanager
def watching_loop(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Charge what blocks the event loop of this thread, whose tasks call `charged_to`, inside the block."""
    lane = _lane()
    before, lane.loop, lane.clock = (lane.loop, lane.clock, lane.running), loop, LoopClock()
    _clocks[loop] = lane.clock
    try:
        yield
    finally:
        lane.loop, lane.clock, lane.running = before
        lane.serial += 1


def pause_deadline() -> Callable[[], None]:
    """Stop counting the seconds of the call inside which this runs, until what is returned is called.

    For calls that queue for a scarce resource: rows of a model, connections, sandboxes. The time in the queue is not
    the fault of the waiting call, and those ahead of it have limits of their own.
    """
    limit = current.get()
    if limit is None or limit.clock is not _clock_here():
        return lambda: None
    limit.pause()
    return limit.resume


def pause_all_deadlines() -> Callable[[], None]:
    """Stop counting the seconds of every call inside which this runs, until what is returned is called.

    For an episode that waits for an outside program to play it: neither its world's call nor the episode has begun.
    """
    paused: list[Limit] = []
    limit, clock = current.get(), _clock_here()
    while limit is not None and limit.clock is clock:
        if limit.since is not None:
            limit.pause()
            paused.append(limit)
        limit = limit.outer

    def resume() -> None:
        for each in paused:
            each.resume()

    return resume


async def within(what: str, kind: str, seconds: float, work: Awaitable[T]) -> T:
    """Await `work`; raises GaveUp when it takes longer than `seconds`, waiting and computing together."""
    try:
        lane: _Lane = _here.lane
    except AttributeError:
        lane = _lane()
    task = asyncio.current_task()
    assert task is not None, "what is awaited with a limit is part of a task"
    # Between the steps of this task, the lane says what the others compute: see `charged_to`.
    charged = lane.loop is not None and lane.loop is task.get_loop()
    clock = lane.clock if charged else _clock_here()
    assert clock is not None, "an event loop runs"
    limit = Limit(what, kind, seconds, clock)
    limit.task, limit.on_abandoned = task, on_abandoned.get()
    outer = limit.outer = current.get()
    token = current.set(limit)
    # An environment that has a text graded is not charged for it: grading has a limit of its own.
    pauses = outer is not None and (kind, outer.kind) == ("grader", "environment")
    if outer is not None and pauses:
        outer.pause()
    if charged:
        lane.running = None if kind in _LOOP_WORK else limit
        lane.serial += 1
    clock.open.add(limit)
    if not clock.ticks:
        clock.begin()
    try:
        result = await work
    except (Exception, asyncio.CancelledError):
        limit.raise_if_late()
        raise
    except GeneratorExit:  # it was left behind: whoever closes it computes something else
        charged = False
        raise
    else:
        limit.raise_if_late()
        return result
    finally:
        clock.open.discard(limit)
        if charged and lane.loop is task.get_loop():  # not after the loop has ended
            _leave(lane, None if outer is None or outer.kind in _LOOP_WORK else outer)
        try:  # noqa: SIM105 - three calls fewer than `suppress`, for every episode
            current.reset(token)
        except ValueError:  # a coroutine that was left behind ends somewhere else
            pass
        if outer is not None and pauses:
            outer.resume()


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
