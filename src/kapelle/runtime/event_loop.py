"""Running coroutines from synchronous code, and code that blocks on threads that can be abandoned."""

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
from typing import Any, Generic, TypeVar

from kapelle.errors import EpisodeError
from kapelle.runtime.deadlines import GaveUp, charged_to, current, leave_behind, raise_in, watching_loop
from kapelle.runtime.interrupts import on_stop, stop_if_asked, stops_here, waited_for


class AbandonableThreads(ThreadPoolExecutor):
    """An executor of daemon threads. A call whose future is cancelled while it runs is given up with its thread.

    `asyncio.to_thread` runs what blocks on its loop's executor, and Python's own executor is joined when the process ends:
    one call that never returns would keep the process for ever.
    """

    def __init__(self, most: int) -> None:
        """Run at most so many calls at once, those that were given up not counted."""
        super().__init__(1)  # what it would start itself is never started
        self._most = most
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._threads_at_work = 0
        self._idle = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call when a thread is free, and return its future."""
        made = _Call(self, fn, args, kwargs)
        with self._guard:
            if self._idle:
                self._idle -= 1
            elif self._threads_at_work < self._most:
                self._threads_at_work += 1
                threading.Thread(target=self._work, name="kapelle-loose", daemon=True).start()
        self._calls.put(made)
        return made

    def _work(self) -> None:
        while (made := self._calls.get()) is not None:
            made.run()
            with self._guard:
                if made.given_up:
                    return  # another thread has its place
                self._idle += 1
            del made

    def replace(self) -> None:
        """Count a thread that was given up no longer, and start one in its place."""
        threading.Thread(target=self._work, name="kapelle-loose", daemon=True).start()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let idle threads end, and the others when they have done what they are at; waits for none."""
        with self._guard:
            count = self._threads_at_work
        for _ in range(count):
            self._calls.put(None)


class _Call(Future[Any]):
    """One call, and the thread that it runs on."""

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
        self._thread: int | None = None

    def run(self) -> None:
        """Call, on this thread."""
        if not self.set_running_or_notify_cancel():
            return
        with self._guard:
            self._thread = threading.get_ident()
        result, failure = None, None
        try:
            try:
                result = self._context.run(self._function, *self._args, **self._named)
            except BaseException as error:  # noqa: BLE001 - belongs to whoever awaits
                failure = error
            with self._guard:
                self._thread = None
                if self.given_up:
                    raise_in(threading.get_ident(), None)
        except GaveUp:  # it came just when the call had returned
            self._thread = None
        if self.given_up:
            return
        if failure is None:
            self.set_result(result)
        else:
            self.set_exception(failure)

    def cancel(self) -> bool:
        """Take the call back; one that runs is given up: what it returns is not wanted any more."""
        if super().cancel():
            return True
        with self._guard:
            if self._thread is None or self.given_up:
                return False
            self.given_up = True
            raise_in(self._thread, GaveUp("nobody waits for it any more"))
        self._owner.replace()
        return False


T = TypeVar("T")


THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Most calls of `asyncio.to_thread` at once, as Python's own default."""
GRACE = 2.0
"""Seconds that tasks have to end when they are cancelled; those that do not are left behind."""


def run_async(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end, also where an event loop runs already (a notebook).

    A `sys.exit` in a task that it starts ends that task with an EpisodeError. asyncio would end the whole loop with
    it, and tasks are where environments and tools run, which are other people's code. Raises StopRequested when
    somebody asks this process to stop (`interrupts.catch_interrupts`); tasks and threads that do not end with it are
    left behind.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(start)
    box: list[T] = []
    failed: list[BaseException] = []

    stops = stops_here()

    def body() -> None:
        if stops:
            waited_for()
        try:
            box.append(_run(start))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=body, daemon=True)  # one that was left behind keeps no process
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return box[0]


def _run(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Do what `asyncio.run` does, but never wait for something that does not end."""
    stop_if_asked()
    # A new event loop; raises OSError where descriptors have run out. asyncio would leave one that is
    # half made, of which Python shows a traceback when it goes. So ask for as many first.
    with selectors.DefaultSelector():
        one, other = socket.socketpair()
        one.close()
        other.close()
    loop = asyncio.new_event_loop()
    threads = AbandonableThreads(THREADS)
    loop.set_default_executor(threads)
    loop.set_task_factory(_contained)
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
    def leave() -> None:  # inside a signal handler
        with suppress(RuntimeError):  # of another thread, which has closed it by now
            loop.call_soon_threadsafe(task.cancel)
            loop.call_soon_threadsafe(loop.call_later, GRACE, loop.stop)

    task.add_done_callback(lambda _: loop.stop())
    with on_stop(leave) if stops_here() else nullcontext():
        stop_if_asked()
        try:
            loop.run_forever()
        except BaseException:
            if task.done() and not task.cancelled():
                task.exception()  # looked at: what it raised is on its way already
            raise
    if task.done() and not task.cancelled():
        return task.result()
    stop_if_asked()
    if not task.done():
        raise RuntimeError("The event loop was stopped before its work was done.")
    return task.result()


def _wind_up(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is left, give it a moment, and leave behind what does not end."""
    left = [task for task in asyncio.all_tasks(loop) if not task.done()]
    if left:
        for task in left:
            task.cancel()
        ended = asyncio.gather(*left, return_exceptions=True)
        ended.add_done_callback(lambda _: loop.stop())
        late = loop.call_later(GRACE, loop.stop)
        loop.run_forever()
        late.cancel()
        for task in left:
            if not task.done():
                _leave_behind(task)
            elif not task.cancelled():
                task.exception()  # looked at: whoever wanted its result has gone
    closing = loop.create_task(loop.shutdown_asyncgens())
    closing.add_done_callback(lambda _: loop.stop())
    late = loop.call_later(GRACE, loop.stop)
    loop.run_forever()
    late.cancel()
    if not closing.done():
        _leave_behind(closing)


def _leave_behind(task: asyncio.Task[Any]) -> None:
    leave_behind(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - asyncio has no other way to say so


def _contained(loop: asyncio.AbstractEventLoop, work: Any, **named: Any) -> asyncio.Task[Any]:
    return asyncio.Task(_Staying(work), loop=loop, **named)


class _Staying(Coroutine[Any, Any, Any]):
    """A coroutine around another one, which no SystemExit leaves.

    It is no `async def`: a task that is cancelled before it starts must throw that into the inner one.
    """

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work

    def __await__(self) -> Any:
        return (yield from self._work.__await__())

    def send(self, value: Any) -> Any:
        limit = current.get()
        try:
            return self._work.send(value) if limit is None else charged_to(limit, self._work.send, value)
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
    """Awaits `work`; `enter` is called whenever it starts to compute and `leave` when it waits or ends.

    It steps the other one by hand inside the same task, and so adds no turn of the event loop.
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
            except BaseException as error:  # noqa: BLE001 - passed on to the work, which handles it
                resume = partial(steps.throw, error)
