"""How long work takes, apart from pauses that are not its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(work: Callable[[], T], most: float) -> tuple[T, float]:
    """Return what `work` returns and the CPU seconds it takes, those of a second try where they are more than `most`.

    What is slow is slow twice; a garbage collection that falls into it, or a machine's pause, is not.
    """
    result, seconds = _once(work)
    return (result, seconds) if seconds < most else _once(work)


def _once(work: Callable[[], T]) -> tuple[T, float]:
    start = time.process_time()
    result = work()
    return result, time.process_time() - start
