"""Deadlines for user code: end a call that does not return in time.

    answer = call("`task` of environment 'math'", "environment", 600.0, environment.task, split, index)
    reward = await within("Grading an answer", "grader", 1800.0, grade(text))

Both raise DeadlineExceeded after these seconds; an episode records it as its error. Environments, graders and engines run on
the thread of the event loop, in a fixed order, so that a run is reproducible; some code works only on the main thread (`signal.alarm`,
connections to SQLite). How a late call is ended depends on what it does:

    it awaits forever                       its task is cancelled, once more after `GRACE` seconds, then abandoned with its episode
    it blocks the main thread               a signal handler raises DeadlineExceeded in the call, then every second
      (`time.sleep`, `while True`)
    it blocks in C code, or another thread  the command ends; files on the disk are complete at every moment

An environment that declares `blocking = True` runs on its own threads (`rollout/bounded_states.py`), which can be abandoned.

Only the time of the call itself counts. The clock of an event loop stops while something blocks the loop, and while this process is
stopped (SIGSTOP, a sleeping laptop).
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
"""Seconds until DeadlineExceeded is raised again in a call that has swallowed it."""
GRACE = 5.0
"""Seconds for a cancelled task to clean up."""
UNBREAKABLE = 30.0
"""Seconds after the call's limit until the command ends, if the call cannot be interrupted."""
BREAKER = signal.SIGURG
"""The signal that wakes the main thread; by default it does nothing."""


class DeadlineExceeded(BaseException):
    """A call exceeded its time limit.

    It is not an Exception, so that `except Exception` in the interrupted code does not catch it.
    """


_LOOP_WORK = frozenset({"engine", "episode"})
"""Kinds of calls that may block the event loop."""


class Limit:
    """The time limit of one call, and its time so far."""

    def __init__(self, what: str, kind: str, seconds: float, clock: LoopClock | None = None) -> None:
        """`what` names the call, `kind` the settings section with its `timeout`; `clock` counts its seconds."""
        self.what, self.kind, self.seconds, self.clock = what, kind, seconds, clock
        self.own = 0.0
        """Seconds before `since`."""
        self.since = None if clock is None else clock.seconds
        self.interrupted_at = 0.0
        """Time when DeadlineExceeded was last raised in it while it blocked."""
        self.cancels = 0
        """How many times its task was cancelled for lateness."""
        self.task: asyncio.Task[Any] | None = None
        self.outer: Limit | None = None
        """The limit of the call that awaits this one."""
        self.on_abandoned: Callable[[DeadlineExceeded], None] | None = None
        """Ends its episode without the task, if the task ignores its cancellation."""

    @property
    def used(self) -> float:
        """Seconds used so far."""
        return self.own + (self.clock.seconds - self.since if self.clock and self.since is not None else 0.0)

    def pause(self) -> None:
        """Stop counting."""
        self.own, self.since = self.used, None

    def resume(self) -> None:
        """Continue counting."""
        if self.since is None and self.clock is not None:
            self.since = self.clock.seconds

    def reason(self) -> DeadlineExceeded:
        """Return the exception for the late call."""
        return DeadlineExceeded(f"{self.what} took more than {self.seconds:g} s (`{self.kind}.timeout`).")

    def raise_if_late(self) -> None:
        """Raise DeadlineExceeded if the task was cancelled for lateness."""
        if self.cancels and self.task is not None:
            for _ in range(self.cancels):
                self.task.uncancel()
            raise self.reason() from None

    def end(self) -> None:
        """Cancel the task of this late call; the third time, end its episode without the task."""
        assert self.task is not None, "a call that is awaited has a task"
        if self.cancels < 2:
            self.cancels += 1
            self.task.cancel()
        elif self.on_abandoned is not None:
            self.on_abandoned(self.reason())
            self.on_abandoned = None


# -------- Calls that await: the event loop counts the seconds in which it is free, and cancels late calls


class LoopClock:
    """Counts the seconds in which an event loop is free."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.open: set[Limit] = set()
        """Awaited calls."""
        self.ticks = False
        """Whether it is checking the calls."""
        self._before = 0.0

    def begin(self) -> None:
        """Check the calls from now on, until none is `open`."""
        self.ticks, self._before = True, time.monotonic()
        asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        # After more than two ticks, the loop was blocked or this process was stopped.
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


# -------- Calls that block: the watchdog notices that a thread stays in one call for too long


class _Lane:
    """One thread that runs user code."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.main = self.thread is threading.main_thread()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop that `run_async` runs here."""
        self.running: Limit | None = None
        """The call that runs now."""
        self.serial = 0
        """Counts calls, so that the watchdog can distinguish a call that has not returned from a later one."""
        self.seen = -1
        self.interrupting = False
        """Whether the signal that ends `running` was sent."""

    def look(self, passed: float) -> None:
        """Add the time since the last look to the call that blocks this thread, and end a late call; called by the watchdog."""
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
                f"{running.reason()} It cannot be interrupted. Declare `blocking = True` on its environment, and resume the run.",
                2,
            )


def _handle_breaker(_number: int, _frame: FrameType | None) -> None:
    """Raise DeadlineExceeded in the call that runs on the main thread, if that is still the late call."""
    lane = _lane()
    if lane.running is not None and lane.interrupting and lane.running.used >= lane.running.seconds:
        lane.interrupting = False
        raise lane.running.reason()


_here = threading.local()
"""Holds this thread's _Lane as `lane`."""
_lanes: dict[_Lane, None] = {}
_starts = machine.ThreadStarts()
current: ContextVar[Limit | None] = ContextVar("limit", default=None)
"""The limit of the current call; tasks that the call starts inherit it."""
on_abandoned: ContextVar[Callable[[DeadlineExceeded], None] | None] = ContextVar("on_abandoned", default=None)
"""Ends the episode of this task without waiting for the task; see `gather_abandonable`."""


def _lane() -> _Lane:
    """Return the record of this thread, and ensure that the watchdog observes it."""
    lane: _Lane | None = getattr(_here, "lane", None)
    if lane is None:
        lane = _here.lane = _Lane()
        _lanes[lane] = None
        if lane.main:
            interrupts.holder = lambda: lane.running.what if lane.running else interrupts.work
            if signal.getsignal(BREAKER) in (signal.SIG_DFL, signal.SIG_IGN):
                signal.signal(BREAKER, _handle_breaker)
        every_tick(_look)
    return lane


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
    """Time limits in seconds; an episode that exceeds one fails with an error."""

    environment: float = 600.0
    """One call of an environment or episode state: `task`, `start`, `observe`, `step`, `close`, …"""
    episode: float = 14_400.0
    """One episode, from its start to its end."""
    engine: float = 3600.0
    """One request to an engine, without its time in the queue."""
    grader: float = 1800.0
    """Grading one text, without the time in a queue for a sandbox or a connection."""


patience_here: ContextVar[Patience] = ContextVar("patience", default=Patience())  # noqa: B039 - frozen
"""The limits of the current episode."""


def call(what: str, kind: str, seconds: float, work: Callable[..., T], *given: Any) -> T:
    """Call `work` on this thread; raise DeadlineExceeded in it if it takes longer than `seconds`.

    The message begins with `what` and names the `timeout` of the settings section `kind`.
    """
    # Every call of an environment goes through this function, so it makes few Python calls.
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
    """End a call, also while DeadlineExceeded is being raised; the outer call `before` continues."""
    late: DeadlineExceeded | None = None
    while True:
        try:
            lane.running = before
            lane.serial += 1
            break
        except DeadlineExceeded as error:
            late = error
    if late is not None:
        raise late


def charged_to(limit: Limit | None, work: Callable[..., T], *given: Any) -> T:
    """Call `work`, a step of a task, as part of the call that started the task."""
    lane: _Lane = _here.lane
    before, lane.running = lane.running, None if limit is None or limit.kind in _LOOP_WORK else limit
    lane.serial += 1
    try:
        return work(*given)
    finally:
        _leave(lane, before)


@contextmanager
def watching_loop(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Watch for calls that block the event loop of this thread; its tasks call `charged_to`."""
    lane = _lane()
    before, lane.loop = (lane.loop, lane.running), loop
    try:
        yield
    finally:
        lane.loop, lane.running = before
        lane.serial += 1


def pause_deadline(*, outer_too: bool = False) -> Callable[[], None]:
    """Stop counting the seconds of the current call until the returned function is called; `outer_too` includes the calls around it.

    For calls in a queue for a scarce resource: rows of a batch, connections, sandboxes. The time in the queue does not count towards
    their limits. An episode that waits for an external program pauses all limits: neither its environment's call nor the episode has begun.
    """
    clock, paused = _clock_here(), list[Limit]()
    limit = current.get()
    while limit is not None:
        if limit.clock is clock and limit.since is not None:
            limit.pause()
            paused.append(limit)
        limit = limit.outer if outer_too else None

    def resume() -> None:
        for limit in paused:
            limit.resume()

    return resume


async def within(what: str, kind: str, seconds: float, work: Awaitable[T]) -> T:
    """Await `work`; raise DeadlineExceeded if it waits and computes for longer than `seconds`."""
    try:
        lane: _Lane = _here.lane
    except AttributeError:
        lane = _lane()
    task = asyncio.current_task()
    assert task is not None, "what is awaited with a limit is part of a task"
    # Between the steps of this task, the lane holds the calls of other tasks: see `charged_to`.
    charged = lane.loop is not None and lane.loop is task.get_loop()
    clock = _clock_here()
    assert clock is not None, "an event loop runs"
    limit = Limit(what, kind, seconds, clock)
    limit.task, limit.on_abandoned = task, on_abandoned.get()
    outer = limit.outer = current.get()
    token = current.set(limit)
    # Grading has its own limit, so it does not count for the environment.
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
    except GeneratorExit:  # it was abandoned, and other code closes it
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
        except ValueError:  # an abandoned coroutine ends in another context
            pass
        if outer is not None and pauses:
            outer.resume()


async def gather_abandonable(
    works: Sequence[Callable[[], Coroutine[Any, Any, T]]], without: Callable[[int, DeadlineExceeded], T]
) -> list[T]:
    """Run coroutines at once and return their results in order, as `asyncio.gather`.

    The result of a coroutine that is late and ignores its cancellation is `without(its place, the error)`.
    """
    loop = asyncio.get_running_loop()
    results: list[asyncio.Future[T]] = [loop.create_future() for _ in works]

    async def one(place: int) -> T:
        def end(error: DeadlineExceeded) -> None:
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
