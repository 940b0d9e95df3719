"""Deadlines for other people's code: a call that does not return in time is given up, whatever it does.

Environments, graders and engines are called on the thread of the event loop, in a fixed order, so that a run repeats.
One thread beside it, the watchdog, looks at what is open several times a second:

    it waits (`await` without end)        its task is cancelled; if it goes on waiting, its coroutine is left behind
    it blocks the loop (`time.sleep`,     a signal is sent to the main thread, whose handler raises GaveUp inside the
      `lock.acquire`, `while True`)         call; again every second while it swallows that
    it cannot be broken off (C code)      the process ends by itself when somebody has asked it to stop

Seconds are those of a clock that stands still while this process is stopped (SIGSTOP, a laptop that sleeps), and a call
pays for its own: while one blocks the loop, the others' seconds are not counted, nor are those in which the loop is
busy with the model.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Generic, TypeVar

from kapelle.runtime import interrupts

T = TypeVar("T")

TICK = 0.1
"""Seconds between two looks."""
PAUSE = 1.0
"""Seconds after which a call that swallowed what broke it is broken again; more than this between two looks is a pause
of the whole process and not counted."""
GRACE = 5.0
"""Seconds that a call which is given up may clean up in."""
BREAKER = signal.SIGURG
"""The signal that wakes the main thread; it does nothing where nobody handles it."""


@dataclass(frozen=True)
class Patience:
    """Total seconds after which something is given up; its episode is then an error."""

    environment: float = 600.0
    """One call of an environment or world: `task`, `start`, `observe`, `step`, `close`, …"""
    episode: float = 14_400.0
    """One episode, from its start to its end."""
    engine: float = 3600.0
    """One request to an engine, the wait for its turn included."""
    grader: float = 1800.0
    """Grading one text, the wait for a sandbox or a judge included."""


class GaveUp(BaseException):
    """A call took longer than it may.

    No Exception, so that the code that is broken off does not take it for one of its own.
    """


class Limit:
    """What one call may take, and what it has taken."""

    def __init__(self, what: str, kind: str, seconds: float) -> None:
        """Keep what is called, the setting that bounds it (`environment`, …) and for how many seconds it may."""
        self.what, self.kind, self.seconds = what, kind, seconds
        self.lane = _lane()
        self.own = 0.0
        """Seconds counted so far, but for those since `since`."""
        self.since: float | None = self._clock()
        self.stage = self.cancels = 0
        """0 in time, 1 cancelled, 2 its coroutine and 3 its task left behind; how often its task was cancelled for it."""
        self.told = 0.0
        """When it was broken last."""
        self.task: asyncio.Task[Any] | None = None
        self.breaking = False
        self.without = _without_me.get()
        """Ends the episode without the task that does not wake up."""

    def _clock(self) -> float:
        # Whether the loop had time matters for what waits beside it, not for what the loop itself works at.
        return self.lane.awake if self.kind in ("engine", "episode") else self.lane.free

    @property
    def used(self) -> float:
        """Seconds."""
        return self.own + (0.0 if self.since is None else self._clock() - self.since)

    def pause(self) -> None:
        """Stop counting: what is inside it counts for itself."""
        self.own, self.since = self.used, None

    def go_on(self) -> None:
        """Count again."""
        self.since = self._clock()

    def reason(self) -> GaveUp:
        """Return why the call is given up."""
        return GaveUp(f"{self.what} took more than {self.seconds:g} s (`{self.kind}.timeout`).")


class _Lane:
    """One thread on which limited calls run, with the event loop that it runs."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.main = self.thread is threading.main_thread()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.running: Limit | None = None
        self.serial = 0
        """Counts what ran, so that the watchdog knows a call that has not returned from one that came after it."""
        self.open: set[Limit] = set()
        """Calls that wait."""
        self.awake = self.free = 0.0
        """Seconds that this lane was not blocked by a call; and those of them in which its loop had time."""
        self._seen: tuple[Limit | None, int] = (None, 0)
        self.beaten = True

    def look(self, passed: float) -> None:
        """Count what has passed since the last look, and end what is late."""
        running, serial = self.running, self.serial
        blocked = running is not None and (running, serial) == self._seen
        self._seen = (running, serial)
        stop = interrupts.wish() if self.main else None
        if blocked:
            assert running is not None
            running.own += passed
            asked = stop is not None and time.monotonic() - stop.since > PAUSE
            if (asked or running.used >= running.seconds) and time.monotonic() - running.told > PAUSE:
                running.told = time.monotonic()
                self._break(running, stop if asked else None)
            return
        self.awake += passed
        if self.beaten:
            self.free += passed
        self._beat()
        for limit in list(self.open):
            over = limit.used - limit.seconds
            if over >= 0 and limit.stage == 0:
                self._expire(limit, 1)
            elif over >= limit.stage * GRACE and limit.stage < 3:
                self._expire(limit, limit.stage + 1)

    def _beat(self) -> None:
        if self.beaten and self.loop is not None:
            self.beaten = False
            self._call(self._answer)

    def _answer(self) -> None:
        self.beaten = True

    def _expire(self, limit: Limit, stage: int) -> None:
        limit.stage = stage
        self._call(partial(_cancel, limit))

    def _call(self, work: Callable[[], None]) -> None:
        loop = self.loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(work)
            except RuntimeError:  # it was closed in between
                self.beaten = True

    def _break(self, running: Limit, stop: interrupts.Wish | None) -> None:
        ident = self.thread.ident
        assert ident is not None
        running.breaking = True
        if self.main:
            signal.pthread_kill(ident, BREAKER)
        elif stop is None:
            raise_in(ident, running.reason())


def _cancel(limit: Limit) -> None:
    if limit not in limit.lane.open or limit.task is None:
        return
    if limit.stage < 3:
        limit.cancels += 1
        limit.task.cancel()
    elif limit.without is not None:  # it waits for something that cannot be cancelled
        limit.lane.open.discard(limit)
        limit.without(limit.reason())


def raise_in(thread: int, error: BaseException | None) -> None:
    """Raise an error in a thread, at its next line of Python; None takes back one that was not raised yet."""
    kind = (
        None
        if error is None
        else ctypes.py_object(type("GaveUp", (GaveUp,), {"__str__": lambda _: str(error)}))
    )
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), kind)


def leave_behind(thing: object) -> None:
    """Keep a coroutine or task that does not end for as long as the process lives.

    Python ends one that nobody holds by raising inside it, wherever that happens; it may answer by computing for ever.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _broken(_number: int, _frame: FrameType | None) -> None:
    """Raise in the call that runs on the main thread, if that is still the one that was to be broken."""
    running = _here.lane.running if hasattr(_here, "lane") else None
    if running is None or not running.breaking:
        return
    running.breaking = False
    stop = interrupts.wish()
    if stop is not None and time.monotonic() - stop.since > PAUSE:
        raise stop.again()
    raise running.reason()


_here = threading.local()
_lanes: dict[int, _Lane] = {}
_watchdog: threading.Thread | None = None
current: ContextVar[Limit | None] = ContextVar("limit", default=None)
"""The limit of the call inside which this code runs; tasks that the call starts have it too."""


_without_me: ContextVar[Callable[[GaveUp], None] | None] = ContextVar("without_me", default=None)
patience_here: ContextVar[Patience] = ContextVar("patience", default=Patience())  # noqa: B039 - frozen
"""The limits of the episode inside which this code runs."""


def _lane() -> _Lane:
    lane: _Lane | None = getattr(_here, "lane", None)
    if lane is None:
        lane = _here.lane = _Lane()
        _lanes[threading.get_ident()] = lane
        _watch(lane)
    return lane


def _watch(lane: _Lane) -> None:
    global _watchdog  # noqa: PLW0603 - there is one
    if lane.main and signal.getsignal(BREAKER) in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(BREAKER, _broken)
    if _watchdog is None or not _watchdog.is_alive():
        _watchdog = threading.Thread(target=_look_for_ever, name="kapelle-watchdog", daemon=True)
        _watchdog.start()


def _look_for_ever() -> None:
    before = time.monotonic()
    while True:
        time.sleep(TICK)
        now = time.monotonic()
        passed, before = min(now - before, PAUSE), now
        for ident, lane in list(_lanes.items()):
            if lane.thread.is_alive():
                lane.look(passed)
            else:
                _lanes.pop(ident, None)
        stop = interrupts.wish()
        if stop is not None:
            stop.waited += passed
            if stop.waited > interrupts.LAST_RESORT:
                _end(stop)


def _end(stop: interrupts.Wish) -> None:
    running = (
        _lanes[threading.main_thread().ident or 0].running
        if threading.main_thread().ident in _lanes
        else None
    )
    held = f"{running.what} holds" if running is not None else "something that cannot be broken off holds"
    sys.stderr.write(
        f"kapelle: {held} the process; it ends without waiting. What the last checkpoint holds is kept, and "
        "what came after it is done again when the run is resumed.\n"
    )
    sys.stderr.flush()
    os._exit(stop.exit_code)


def _forget() -> None:
    global _watchdog  # noqa: PLW0603 - a forked process has its own, when it needs one
    _watchdog = None
    _lanes.clear()
    if hasattr(_here, "lane"):
        del _here.lane


os.register_at_fork(after_in_child=_forget)


def _refuse_when_stopping(lane: _Lane) -> None:
    """Begin nothing new where somebody has asked this process to stop and what was open has had its time."""
    stop = interrupts.wish() if lane.main else None
    if stop is not None and time.monotonic() - stop.since > PAUSE:
        raise stop.again()


def call(what: str, kind: str, seconds: float, work: Callable[..., T], *given: Any) -> T:
    """Call `work` here and now; raises GaveUp inside it, and out of here, when it takes longer than `seconds`."""
    limit = Limit(what, kind, seconds)
    lane = limit.lane
    _refuse_when_stopping(lane)
    before, lane.running = lane.running, limit
    lane.serial += 1
    try:
        return work(*given)
    finally:
        _leave(lane, before)


def _leave(lane: _Lane, before: Limit | None) -> None:
    if not lane.main and lane.running is not None and lane.running.breaking:
        raise_in(lane.thread.ident or 0, None)
    lane.running = before
    lane.serial += 1


def on_account(limit: Limit, work: Callable[..., T], *given: Any) -> T:
    """Call `work`, a step of a task that a call has started, as part of that call."""
    lane = limit.lane
    if limit.kind not in ("environment", "grader") or lane is not getattr(_here, "lane", None):
        return work(*given)
    before, lane.running = lane.running, limit
    lane.serial += 1
    try:
        return work(*given)
    finally:
        _leave(lane, before)


@contextmanager
def looping(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let calls that wait on this thread be ended by its event loop, inside the block."""
    lane = _lane()
    before, lane.loop = lane.loop, loop
    try:
        yield
    finally:
        lane.loop = before
        lane.beaten = True


def within(what: str, kind: str, seconds: float, work: Awaitable[T]) -> Bounded[T]:
    """Return `work` to await, which raises GaveUp when it takes longer than `seconds`, waiting and computing together."""
    return Bounded(Limit(what, kind, seconds), work)


class Bounded(Generic[T]):
    """An awaitable around another one that ends in time, though the other may not.

    It steps the other by hand, inside the same task: no turn of the event loop is added.
    """

    def __init__(self, limit: Limit, work: Awaitable[T]) -> None:
        self._limit, self._work = limit, work

    def __await__(self) -> Generator[Any, Any, T]:
        limit, lane = self._limit, self._limit.lane
        _refuse_when_stopping(lane)
        steps = self._work.__await__()
        resume: Callable[[], Any] = partial(next, steps)
        limit.task = asyncio.current_task()
        if limit.task is not None and lane.loop is not limit.task.get_loop():
            lane.loop, lane.beaten = limit.task.get_loop(), True  # a loop that `run_async` did not start
        outer = current.get()
        token = current.set(limit)
        if outer is not None and not (limit.kind == "grader" and outer.kind == "environment"):
            outer = None
        if outer is not None:
            outer.pause()  # grading has a limit of its own
        lane.open.add(limit)
        try:
            while True:
                before, lane.running = lane.running, limit
                lane.serial += 1
                try:
                    waits_for = resume()
                except StopIteration as done:
                    result: T = done.value
                    return result
                except asyncio.CancelledError:
                    self._convert()
                    raise
                finally:
                    _leave(lane, before)
                try:
                    resume = partial(steps.send, (yield waits_for))
                except asyncio.CancelledError as error:
                    if limit.cancels > 1:  # it was cancelled before, and waits on
                        leave_behind(self._work)
                        self._convert()
                    resume = partial(steps.throw, error)
                except BaseException as error:  # noqa: BLE001 - a message for the work, which answers it
                    resume = partial(steps.throw, error)
        finally:
            lane.open.discard(limit)
            with suppress(ValueError):  # a coroutine that was left behind ends somewhere else
                current.reset(token)
            if outer is not None:
                outer.go_on()

    def _convert(self) -> None:
        """Raise GaveUp where the cancellation was the watchdog's own."""
        limit = self._limit
        if limit.cancels and limit.task is not None:
            for _ in range(limit.cancels):
                limit.task.uncancel()
            raise limit.reason() from None


async def all_of(
    works: Sequence[Callable[[], Coroutine[Any, Any, T]]], without: Callable[[int, GaveUp], T]
) -> list[T]:
    """Run coroutines at once and return their results in order, as `asyncio.gather`.

    One whose task is given up and cannot be woken has the result `without(its place, why)`.
    """
    loop = asyncio.get_running_loop()
    results: list[asyncio.Future[T]] = [loop.create_future() for _ in works]

    async def one(place: int) -> T:
        def end(error: GaveUp) -> None:
            if not results[place].done():
                results[place].set_result(without(place, error))

        _without_me.set(end)
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
