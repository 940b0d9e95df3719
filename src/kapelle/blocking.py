"""Awaiting from plain code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from kapelle.errors import EpisodeError

T = TypeVar("T")


def run_async(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end, also where an event loop runs already (a notebook).

    A `sys.exit` in a task that it starts ends that task with an EpisodeError. asyncio would end the whole loop with
    it, and tasks are where environments and tools run, which are other people's code.
    """
    start = partial(_within, start)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(start())
    box: list[T] = []
    failed: list[BaseException] = []

    def body() -> None:
        try:
            box.append(asyncio.run(start()))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return box[0]


async def _within(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    asyncio.get_running_loop().set_task_factory(_contained)
    return await start()


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
        try:
            return self._work.send(value)
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
