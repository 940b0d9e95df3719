"""Threads that can be abandoned: nothing waits for them, not even the end of the process.

`asyncio.to_thread` runs what blocks on its loop's executor, and Python's own executor is joined when the process ends:
one call that never returns would keep it for ever.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from kapelle.runtime.watchdog import GaveUp, raise_in


class LooseThreads(ThreadPoolExecutor):
    """An executor of daemon threads. A call whose future is cancelled while it runs is given up with its thread."""

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
        self, owner: LooseThreads, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
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
