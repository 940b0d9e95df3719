"""Deadlines for other people's code: a call that does not return in time is given up, whatever it is doing.

Environments, graders and engines are called on the thread of the event loop, in a fixed order, so that a run repeats;
`watchdog.py` makes sure that none of them blocks it for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from kapelle.runtime import interrupts
from kapelle.runtime.watchdog import (
    PAUSE,
    GaveUp,
    Limit,
    WatchedThread,
    current,
    here,
    leave,
    leave_behind,
    watched_thread,
    without_me,
)

T = TypeVar("T")


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


def _refuse_when_stopping(watched: WatchedThread) -> None:
    """Start nothing new once this process was asked to stop and open calls have had time to end."""
    stop = interrupts.pending_stop() if watched.stops else None
    if stop is not None and time.monotonic() - stop.since > PAUSE:
        raise stop.again()


def call(what: str, kind: str, seconds: float, work: Callable[..., T], *given: Any) -> T:
    """Call `work` here and now; raises GaveUp inside it, and out of here, when it takes longer than `seconds`."""
    limit = Limit(what, kind, seconds)
    watched = limit.watched
    _refuse_when_stopping(watched)
    return _under(limit, work, *given)


def on_account(limit: Limit, work: Callable[..., T], *given: Any) -> T:
    """Call `work`, a step of a task that a call has started, as part of that call."""
    watched = limit.watched
    if limit.kind not in ("environment", "grader") or watched is not getattr(here, "watched", None):
        return work(*given)
    return _under(limit, work, *given)


def _under(limit: Limit, work: Callable[..., T], *given: Any) -> T:
    watched = limit.watched
    before, watched.running = watched.running, limit
    watched.serial += 1
    try:
        return work(*given)
    finally:
        leave(watched, before)


@contextmanager
def looping(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let the event loop of this thread end calls that wait on it, inside the block."""
    watched = watched_thread()
    before, watched.loop = watched.loop, loop
    try:
        yield
    finally:
        watched.loop = before
        watched.loop_answered = True
        for limit in tuple(watched.open):  # of tasks that were left behind: nothing can end them any more
            if limit.task is not None and limit.task.get_loop() is loop:
                watched.open.discard(limit)


def stand_in_line() -> Callable[[], None]:
    """Stop counting the seconds of the call inside which this runs, until what is returned is called.

    For calls that queue for a scarce resource: rows of a model, connections, sandboxes. The time in the queue is not
    the fault of the waiting call, and those ahead of it have limits of their own.
    """
    limit = current.get()
    if limit is None or limit.watched is not watched_thread():
        return _nothing
    limit.pause()
    return limit.go_on


def not_begun() -> Callable[[], None]:
    """Stop counting the seconds of every call inside which this runs, until what is returned is called.

    For an episode that waits for somebody to play it: neither its world's call nor the episode itself has begun.
    """
    paused: list[Limit] = []
    limit = current.get()
    while limit is not None and limit.watched is watched_thread():
        if limit.since is not None:
            limit.pause()
            paused.append(limit)
        limit = limit.outer

    def go_on() -> None:
        for each in paused:
            each.go_on()

    return go_on


def _nothing() -> None:
    return None


def within(what: str, kind: str, seconds: float, work: Awaitable[T]) -> Bounded[T]:
    """Return `work` to await, which raises GaveUp when it takes longer than `seconds`, waiting and computing together."""
    return Bounded(Limit(what, kind, seconds), work)


@contextmanager
def _opened(limit: Limit, work: object) -> Iterator[None]:
    """Let the watchdog see a call that is awaited in this task."""
    watched = limit.watched
    try:
        _refuse_when_stopping(watched)
    except BaseException:
        if isinstance(work, Coroutine):
            work.close()  # it was never begun
        raise
    limit.task = asyncio.current_task()
    if limit.task is not None and watched.loop is not limit.task.get_loop():
        watched.loop, watched.loop_answered = (
            limit.task.get_loop(),
            True,
        )  # a loop that `run_async` did not start
    outer = limit.outer = current.get()
    token = current.set(limit)
    if outer is not None and not (limit.kind == "grader" and outer.kind == "environment"):
        outer = None
    if outer is not None:
        outer.pause()  # grading has a limit of its own
    watched.open.add(limit)
    try:
        yield
    finally:
        watched.open.discard(limit)
        with suppress(ValueError):  # a coroutine that was left behind ends somewhere else
            current.reset(token)
        if outer is not None:
            outer.go_on()


class Bounded(Generic[T]):
    """An awaitable around another one that ends in time, even if the other one does not.

    It steps the other one by hand inside the same task, and so adds no turn of the event loop.
    """

    def __init__(self, limit: Limit, work: Awaitable[T]) -> None:
        self._limit, self._work = limit, work

    def __await__(self) -> Generator[Any, Any, T]:
        with _opened(self._limit, self._work):
            return (yield from self._steps())

    def _steps(self) -> Generator[Any, Any, T]:
        limit, watched = self._limit, self._limit.watched
        steps = self._work.__await__()
        resume: Callable[[], Any] = partial(next, steps)
        while True:
            before, watched.running = watched.running, limit
            watched.serial += 1
            try:
                waits_for = resume()
            except StopIteration as done:
                self._convert()
                result: T = done.value
                return result
            except (Exception, asyncio.CancelledError):
                self._convert()
                raise
            finally:
                leave(watched, before)
            try:
                resume = partial(steps.send, (yield waits_for))
            except BaseException as error:  # noqa: BLE001 - a message for the work, which answers it
                if limit.cancels > 1:  # it was cancelled before, and waits on
                    leave_behind(self._work)
                    self._convert()
                resume = partial(steps.throw, error)

    def _convert(self) -> None:
        """Raise GaveUp where the watchdog has cancelled the call, whatever the call made of that."""
        limit = self._limit
        if limit.cancels and limit.task is not None:
            for _ in range(limit.cancels):
                limit.task.uncancel()
            raise limit.reason() from None


async def all_of(
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

        without_me.set(end)
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
