"""An awaitable around another one that notes when it computes and when it waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Stepped(Generic[T]):
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
