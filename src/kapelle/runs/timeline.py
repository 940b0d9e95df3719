"""The time of each activity in a step: every moment counts towards exactly one activity, so that the parts add up to the whole.

While code of an activity runs, the time counts as that activity. While all code waits, the time counts as the first of
`ACTIVITIES` that some code waits for; all other time is `idle`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

from kapelle.runtime.event_loop import HookedAwaitable

T = TypeVar("T")

ACTIVITIES: Final = ("generate", "environment", "grade", "score", "update", "publish")


class Timeline:
    """Attributes time to activities, even while many coroutines take turns on one thread."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._seconds = dict.fromkeys((*ACTIVITIES, "idle"), 0.0)
        self._waiting = dict.fromkeys(ACTIVITIES, 0)
        self._running: list[str] = []
        self._current = "idle"
        """The activity that the time since `_last` counts towards."""

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every activity and of `idle`; they add up to the time since the start."""
        self._turn()
        return dict(self._seconds)

    async def during(self, activity: str, work: Awaitable[T]) -> T:
        """Await `work`; the time in which it computes, or in which all code waits for it, counts as `activity`."""
        self._waiting[activity] += 1
        try:
            return await HookedAwaitable(work, partial(self.enter, activity), self.leave)
        finally:
            self._waiting[activity] -= 1
            self._turn()

    def enter(self, activity: str) -> None:
        """Count the time from now on as `activity`, until `leave`."""
        self._running.append(activity)
        self._turn()

    def leave(self) -> None:
        """End the activity that was entered last."""
        self._running.pop()
        self._turn()

    @contextmanager
    def phase(self, activity: str) -> Iterator[None]:
        """Count the time in a `with` block as `activity`."""
        self.enter(activity)
        try:
            yield
        finally:
            self.leave()

    def _turn(self) -> None:
        """Add the time up to now to the current activity, and choose the next activity."""
        now = time.perf_counter()
        self._seconds[self._current] += now - self._last
        self._last = now
        if self._running:
            self._current = self._running[-1]
            return
        self._current = "idle"
        for name in ACTIVITIES:
            if self._waiting[name]:
                self._current = name
                return
