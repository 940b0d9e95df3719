"""Run coroutines from synchronous code, and run blocking code on threads that can be abandoned.

The function `run_async` is a variant of `asyncio.run` that never waits for user code at the end: tasks and threads that ignore their
cancellation are abandoned. The function also works inside the event loop of a notebook, and a `sys.exit` in a task does not end it.
"""

from __future__ import annotations

import asyncio
import os
import queue
import selectors
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from kapelle.errors import EpisodeError
from kapelle.runtime.deadlines import charged_to, current, watching_loop
from kapelle.runtime.interrupts import (
    left_behind,
    listed,
    stop_if_requested,
    stops_here,
    to_notify,
    waited_for,
)


class AbandonableThreads(ThreadPoolExecutor):
    """An executor with daemon threads. If the future of a running call is cancelled, the call and its thread are abandoned.

    The function `asyncio.to_thread` runs blocking code on the executor of the event loop. Python joins the threads of its own
    executor at exit, so a call that never returns would keep the process running forever.
    """

    def __init__(self, most: int) -> None:
        """Allow at most `most` concurrent calls, not counting abandoned calls."""
        super().__init__(1)  # `submit` is replaced, so its thread never starts
        self._most = most
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._threads_at_work = 0
        self._idle = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call as soon as a thread is free, and return the future of its result."""
        made = _Call(self, fn, args, kwargs)
        with self._guard:
            if self._idle:
                self._idle -= 1
            elif self._threads_at_work < self._most:
                self._threads_at_work += 1
                self.start_thread()
        self._calls.put(made)
        return made

    def _work(self) -> None:
        while (made := self._calls.get()) is not None:
            made.run()
            with self._guard:
                if made.given_up:
                    return  # another thread has replaced this one
                self._idle += 1
            del made

    def start_thread(self) -> None:
        """Start another thread of the executor."""
        threading.Thread(target=self._work, name="kapelle-loose", daemon=True).start()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End idle threads immediately and all other threads after their current call. This method does not wait for them."""
        with self._guard:
            count = self._threads_at_work
        for _ in range(count):
            self._calls.put(None)


class _Call(Future[Any]):
    """One call, and the thread that runs the call."""

    def __init__(
        self,
        owner: AbandonableThreads,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        named: dict[str, Any],
    ) -> None:
        super().__init__()
        self.given_up = False
        self._owner, self._context = owner, copy_context()
        self._function, self._args, self._named = function, args, named
        self._guard = threading.Lock()

    def run(self) -> None:
        """Call the function on this thread, and set the result unless the call was abandoned."""
        if not self.set_running_or_notify_cancel():
            return
        result, failure = None, None
        try:
            result = self._context.run(self._function, *self._args, **self._named)
        except BaseException as error:  # noqa: BLE001 - the awaiting code raises it
            failure = error
        with self._guard:
            if self.given_up:
                return
            if failure is None:
                self.set_result(result)
            else:
                self.set_exception(failure)

    def cancel(self) -> bool:
        """Cancel the call. If the call is already running, abandon the call and its thread."""
        if super().cancel():
            return True
        with self._guard:
            if self.done() or self.given_up:
                return False
            self.given_up = True
        self._owner.start_thread()
        return False


T = TypeVar("T")


THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Maximum number of concurrent calls of `asyncio.to_thread`, which is the same as Python's default."""
GRACE = 2.0
"""Time in seconds until cancelled tasks that have not ended are abandoned."""


def run_async(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end, even if an event loop is already running (in a notebook).

    If user code, such as an environment or a tool, calls `sys.exit` in a task, the task fails with an EpisodeError; asyncio would end
    the whole loop instead. Raises StopRequested after a stop request (`interrupts.catch_interrupts`). Tasks and threads that do not
    end are abandoned.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(start)
    # A loop runs already: run another one on a daemon thread.
    result: Future[T] = Future()
    stops = stops_here()

    def body() -> None:
        if stops:
            waited_for()
        try:
            result.set_result(_run(start))
        except BaseException as error:  # noqa: BLE001 - reraised in the caller's thread
            result.set_exception(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join()
    return result.result()


def _run(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine like `asyncio.run`, but without waiting for tasks that do not end."""
    stop_if_requested()
    # Without free descriptors, asyncio would leave a half-made loop, and Python would print a traceback when that is collected.
    # So first open as many descriptors as a loop needs, which raises OSError if there are too few.
    with selectors.DefaultSelector():
        one, other = socket.socketpair()
        one.close()
        other.close()
    loop = asyncio.new_event_loop()
    threads = AbandonableThreads(THREADS)
    loop.set_default_executor(threads)
    loop.set_task_factory(lambda loop, work, **named: asyncio.Task(_Contained(work), loop=loop, **named))
    try:
        asyncio.set_event_loop(loop)
        with watching_loop(loop):
            try:
                return _until_done(loop, loop.create_task(start()))
            finally:
                _wind_up(loop)
    finally:
        asyncio.set_event_loop(None)
        threads.shutdown()
        loop.close()


def _until_done(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    """Run the loop until a task is done, and return its result. Raises StopRequested after a stop request."""

    def leave() -> None:  # inside a signal handler
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(task.cancel)
            loop.call_soon_threadsafe(loop.call_later, GRACE, loop.stop)

    task.add_done_callback(lambda _: loop.stop())
    with listed(leave, to_notify) if stops_here() else nullcontext():
        stop_if_requested()
        try:
            loop.run_forever()
        except BaseException:
            if task.done() and not task.cancelled():
                task.exception()  # mark it as retrieved: it is being raised already
            raise
    if task.done() and not task.cancelled():
        return task.result()
    stop_if_requested()
    if not task.done():
        raise RuntimeError("The event loop was stopped before its work was done.")
    return task.result()


def _wind_up(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the remaining tasks, and abandon tasks that have not ended after `GRACE` seconds."""
    left = [task for task in asyncio.all_tasks(loop) if not task.done()]
    for task in left:
        task.cancel()
    if left:
        _run_for_a_moment(loop, asyncio.gather(*left, return_exceptions=True))
    closing = loop.create_task(loop.shutdown_asyncgens())
    _run_for_a_moment(loop, closing)
    for task in (*left, closing):
        if not task.done():
            left_behind.append(task)
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - asyncio has no public way
        elif not task.cancelled():
            task.exception()  # mark it as retrieved: its result is unused


def _run_for_a_moment(loop: asyncio.AbstractEventLoop, work: asyncio.Future[Any]) -> None:
    """Run the loop until `work` is done, but at most for `GRACE` seconds."""
    work.add_done_callback(lambda _: loop.stop())
    late = loop.call_later(GRACE, loop.stop)
    loop.run_forever()
    late.cancel()


class _Contained(Coroutine[Any, Any, Any]):
    """Wraps the coroutine of a task to convert SystemExit to EpisodeError.

    The time of its steps is counted as time of the call that started the task.

    The wrapper is a class and not an `async def`, because a task that is cancelled before it starts must throw the error into the
    inner coroutine.
    """

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work

    def __await__(self) -> Any:
        return (yield from self._work.__await__())

    def send(self, value: Any) -> Any:
        try:
            return charged_to(current.get(), self._work.send, value)
        except SystemExit as error:
            raise EpisodeError(f"a task was ended by sys.exit({error.code!r})") from error

    def throw(
        self,
        kind: Any,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
    ) -> Any:
        try:
            return self._work.throw(kind if value is None else value)  # type: ignore[arg-type]
        except SystemExit as error:
            raise EpisodeError(f"a task was ended by sys.exit({error.code!r})") from error

    def close(self) -> None:
        self._work.close()


class HookedAwaitable(Generic[T]):
    """Awaits `work`, and calls `enter` whenever `work` starts to compute and `leave` whenever `work` starts to wait or ends.

    This class runs the steps of `work` inside the same task, and therefore adds no iteration of the event loop.
    """

    def __init__(self, work: Awaitable[T], enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._work, self._enter, self._leave = work, enter, leave

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._work.__await__()
        resume: Callable[[], Any] = partial(next, steps)
        while True:
            self._enter()
            try:
                waits_for = resume()
            except StopIteration as done:
                result: T = done.value
                return result
            finally:
                self._leave()
            try:
                resume = partial(steps.send, (yield waits_for))
            except BaseException as error:  # noqa: BLE001 - thrown into the work
                resume = partial(steps.throw, error)


class LoopThread:
    """A context manager for an event loop on a separate thread, on which other threads can run coroutines."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self.begun = threading.Event()
        """Event that is set when the thread is ready to run coroutines."""
        self._thread = threading.Thread(
            target=lambda: run_async(self._wait), name="kapelle-loop", daemon=True
        )

    async def _wait(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self.begun.set()
        await self._over.wait()

    async def ask(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the thread and return its result. If this call is cancelled, the coroutine is also cancelled."""
        return await asyncio.wrap_future(self.begin(work))

    def begin(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start a coroutine on the thread. Any thread may wait for its result."""
        assert self._loop is not None, "the thread has begun"
        return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def __enter__(self) -> Self:
        self._thread.start()
        self.begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._over is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(5.0)
