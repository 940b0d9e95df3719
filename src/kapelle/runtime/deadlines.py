"""Run user code with time limits, and end calls that do not return in time.

    answer = call("`task` of environment 'math'", "environment", 600.0, environment.task, split, index)
    reward = await within("Grading an answer", "grader", 1800.0, grade(text))

Both functions raise DeadlineExceeded after the given number of seconds. An episode stores this error as its `error`. Environments,
graders and engines run on the thread of the event loop in a fixed order, so that runs are reproducible. In addition, some code works
only on the main thread (`signal.alarm`, SQLite connections). How a late call is ended depends on what the call does:

    The call awaits forever                 The task is cancelled, cancelled again after `GRACE` seconds, and then abandoned together
                                            with its episode.
    The call blocks the main thread         A signal handler raises DeadlineExceeded in the call, and raises it again every second.
      (`time.sleep`, `while True`)
    The call blocks in C code, or           The command ends. The files on disk are complete at every moment.
      in another thread

An environment that declares `blocking = True` runs on separate threads (`rollout/bounded_states.py`), which can be abandoned.

Only the time of the call itself is counted. The clock of an event loop stops while other code blocks the loop, and while this process
is stopped (SIGSTOP, a sleeping laptop).
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
"""Time in seconds until DeadlineExceeded is raised again in a call that caught it and continued."""
GRACE = 5.0
"""Maximum time in seconds for the cleanup of a cancelled task."""
UNBREAKABLE = 30.0
"""Time in seconds between the time limit of a call and the end of the command, if the call cannot be interrupted."""
BREAKER = signal.SIGURG
"""The signal that interrupts the main thread. By default, processes ignore this signal."""


class DeadlineExceeded(BaseException):
    """A call exceeded its time limit.

    The class does not inherit from Exception, so that `except Exception` in the interrupted code does not catch it.
    """


_LOOP_WORK = frozenset({"engine", "episode"})
"""Kinds of calls that are allowed to block the event loop."""


class Limit:
    """The time limit of one call, and the time that the call has used."""

    def __init__(self, what: str, kind: str, seconds: float, clock: LoopClock | None = None) -> None:
        """Set the name of the call (`what`), the settings section with its `timeout` (`kind`), its limit and its clock."""
        self.what, self.kind, self.seconds, self.clock = what, kind, seconds, clock
        self.own = 0.0
        """Number of seconds that the call used before `since`."""
        self.since = None if clock is None else clock.seconds
        self.interrupted_at = 0.0
        """Time when DeadlineExceeded was last raised in the call while it blocked the thread."""
        self.cancels = 0
        """Number of times that the task of the call was cancelled because it exceeded the limit."""
        self.task: asyncio.Task[Any] | None = None
        self.outer: Limit | None = None
        """The limit of the call that awaits this call."""
        self.on_abandoned: Callable[[DeadlineExceeded], None] | None = None
        """Function that ends the episode of the call without waiting for the task, if the task ignores its cancellation."""

    @property
    def used(self) -> float:
        """Number of seconds that the call has used so far."""
        return self.own + (self.clock.seconds - self.since if self.clock and self.since is not None else 0.0)

    def pause(self) -> None:
        """Stop counting the time of the call."""
        self.own, self.since = self.used, None

    def resume(self) -> None:
        """Continue counting the time of the call."""
        if self.since is None and self.clock is not None:
            self.since = self.clock.seconds

    def reason(self) -> DeadlineExceeded:
        """Return the exception that is raised because the call is late."""
        return DeadlineExceeded(f"{self.what} took more than {self.seconds:g} s (`{self.kind}.timeout`).")

    def raise_if_late(self) -> None:
        """Raise DeadlineExceeded if the task was cancelled because it exceeded the limit."""
        if self.cancels and self.task is not None:
            for _ in range(self.cancels):
                self.task.uncancel()
            raise self.reason() from None

    def end(self) -> None:
        """Cancel the task of this late call. The third time, end its episode without waiting for the task."""
        assert self.task is not None, "a call that is awaited has a task"
        if self.cancels < 2:
            self.cancels += 1
            self.task.cancel()
        elif self.on_abandoned is not None:
            self.on_abandoned(self.reason())
            self.on_abandoned = None


# -------- Calls that await: the event loop counts the seconds in which it is free, and cancels late calls


class LoopClock:
    """A clock that counts only the seconds in which an event loop is not blocked."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.open: set[Limit] = set()
        """Limits of the calls that are being awaited."""
        self.ticks = False
        """Whether the clock is checking the calls."""
        self._before = 0.0

    def begin(self) -> None:
        """Start to check the calls, until `open` is empty."""
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
    """Return the clock of the event loop that is running on this thread, or None if no event loop is running."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return _clocks.get(loop) or _clocks.setdefault(loop, LoopClock())


# -------- Calls that block: the watchdog notices that a thread stays in one call for too long


class _Lane:
    """The state of a thread that runs user code."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.main = self.thread is threading.main_thread()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop that `run_async` is running on this thread."""
        self.running: Limit | None = None
        """The limit of the call that is currently running on this thread."""
        self.serial = 0
        """Number of calls so far. The watchdog uses it to distinguish a call that has not returned from a later call."""
        self.seen = -1
        self.interrupting = False
        """Whether the signal that ends the running call was already sent."""

    def look(self, passed: float) -> None:
        """Add the time since the last check to the call that blocks this thread, and end the call if it is late.

        The watchdog calls this method.
        """
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
    """Raise DeadlineExceeded in the call that is running on the main thread, if this call is still late."""
    lane = _lane()
    if lane.running is not None and lane.interrupting and lane.running.used >= lane.running.seconds:
        lane.interrupting = False
        raise lane.running.reason()


_here = threading.local()
"""Thread-local storage, with the state of the current thread in the attribute `lane`."""
_lanes: dict[_Lane, None] = {}
_starts = machine.ThreadStarts()
current: ContextVar[Limit | None] = ContextVar("limit", default=None)
"""The limit of the current call. Tasks that the call starts inherit this limit."""
on_abandoned: ContextVar[Callable[[DeadlineExceeded], None] | None] = ContextVar("on_abandoned", default=None)
"""Function that ends the episode of the current task without waiting for the task; see `gather_abandonable`."""


def _lane() -> _Lane:
    """Return the state of this thread, and make sure that the watchdog observes the thread."""
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
    """Time limits in seconds. An episode that exceeds a limit fails."""

    environment: float = 600.0
    """Time limit of one call of an environment or episode state, such as `task`, `start`, `observe`, `step` or `close`."""
    episode: float = 14_400.0
    """Time limit of one episode, from its start to its end."""
    engine: float = 3600.0
    """Time limit of one request to an engine, without the time that the request waits in the queue."""
    grader: float = 1800.0
    """Time limit for grading one text, without the time that the call waits for a sandbox or a connection."""


patience_here: ContextVar[Patience] = ContextVar("patience", default=Patience())  # noqa: B039 - frozen
"""The time limits of the current episode."""


def call(what: str, kind: str, seconds: float, work: Callable[..., T], *given: Any) -> T:
    """Call `work` on this thread, and raise DeadlineExceeded in the call if it takes longer than `seconds`.

    The error message starts with `what` and refers to the setting `timeout` of the settings section `kind`.
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
    """End a call, even if DeadlineExceeded is being raised, and continue to count the time of the outer call `before`."""
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
    """Call `work`, which is a step of a task, and count its time as time of the call that started the task."""
    lane: _Lane = _here.lane
    before, lane.running = lane.running, None if limit is None or limit.kind in _LOOP_WORK else limit
    lane.serial += 1
    try:
        return work(*given)
    finally:
        _leave(lane, before)


@contextmanager
def watching_loop(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Watch for calls that block the event loop of this thread.

    The tasks of this event loop must call `charged_to`.
    """
    lane = _lane()
    before, lane.loop = (lane.loop, lane.running), loop
    try:
        yield
    finally:
        lane.loop, lane.running = before
        lane.serial += 1


def pause_deadline(*, outer_too: bool = False) -> Callable[[], None]:
    """Stop counting the time of the current call, until the returned function is called.

    With `outer_too`, this also applies to the calls that contain the current call. This function is used while a call waits in a
    queue for a limited resource, such as a place in a batch, a connection or a sandbox. An episode that waits for an external program
    pauses all limits, because neither the call of the environment nor the episode has started.
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
    """Await `work`, and raise DeadlineExceeded if the total time of waiting and computing exceeds `seconds`."""
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
    """Run coroutines concurrently and return their results in order, like `asyncio.gather`.

    If a coroutine is late and ignores its cancellation, the function `without` is called with its index and the error, and the
    returned value is used as its result.
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
