"""The event loop in which a rollout engine samples, on a thread of its own, so that HTTP is answered meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from kapelle.runtime.event_loop import run_async

T = TypeVar("T")


class EngineThread:
    """Runs coroutines beside the engine; a context manager."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(
            target=lambda: run_async(self._wait), name="kapelle-engine", daemon=True
        )

    async def _wait(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._begun.set()
        await self._over.wait()

    @property
    def begun(self) -> bool:
        """Whether it runs coroutines."""
        return self._begun.is_set()

    async def ask(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine beside the engine and return its result; cancelled, it is cancelled there."""
        return await asyncio.wrap_future(self.begin(work))

    def begin(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Begin a coroutine beside the engine; any thread may wait for its result."""
        assert self._loop is not None, "the thread has begun"
        return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def __enter__(self) -> Self:
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._over is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(5.0)
