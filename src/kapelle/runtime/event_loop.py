"""Running coroutines from synchronous code."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any, TypeVar

from kapelle.errors import EpisodeError
from kapelle.runtime.deadlines import looping, on_account
from kapelle.runtime.interrupts import on_stop, stop_if_asked, stops_here, waited_for
from kapelle.runtime.loose_threads import LooseThreads
from kapelle.runtime.watchdog import current, leave_behind

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
    loop = _new_loop()
    threads = LooseThreads(THREADS)
    loop.set_default_executor(threads)
    loop.set_task_factory(_contained)
    try:
        asyncio.set_event_loop(loop)
        with looping(loop):
            try:
                return _until_done(loop, loop.create_task(start()))
            finally:
                _wind_up(loop)
    finally:
        asyncio.set_event_loop(None)
        threads.shutdown()
        loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop; raises OSError where descriptors have run out.

    asyncio would leave one that is half made, of which Python shows a traceback when it goes. So ask for as many first.
    """
    with selectors.DefaultSelector():
        one, other = socket.socketpair()
        one.close()
        other.close()
    return asyncio.new_event_loop()


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
            return self._work.send(value) if limit is None else on_account(limit, self._work.send, value)
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
