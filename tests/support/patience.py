"""How long work takes and what it leaves, apart from pauses and from what others hold for a moment."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(work: Callable[[], T], most: float) -> tuple[T, float]:
    """Return what `work` returns and the CPU seconds it takes, those of a second try where they are more than `most`.

    What is slow is slow twice; a garbage collection that falls into it, or a machine's pause, is not.
    """
    result, seconds = _once(work)
    return (result, seconds) if seconds < most else _once(work)


def grown_since(before: Counter[str], count: Callable[[], Counter[str]]) -> Counter[str]:
    """Return what there is more of than before, by the last of the counts that are taken until there is nothing.

    Another thread may hold something for a moment, as the watchdog does while it looks; what has grown stays.
    """
    grown = count() - before
    for _ in range(20):
        if not grown:
            break
        time.sleep(0.1)
        grown = count() - before
    return grown


def _once(work: Callable[[], T]) -> tuple[T, float]:
    start = time.process_time()
    result = work()
    return result, time.process_time() - start
