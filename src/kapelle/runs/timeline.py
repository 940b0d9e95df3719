"""Measures the time of each activity in a step.

Every moment counts towards exactly one activity, so that the parts add up to the total time. While code of an activity
runs, the time counts towards this activity. While all code waits, the time counts towards the first of `ACTIVITIES` for
which some code waits. All other time counts as `idle`.
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
        """The activity to which the time since `_last` is attributed."""

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every activity and of `idle`. The sum of these times is the time since the start."""
        self._turn()
        return dict(self._seconds)

    async def during(self, activity: str, work: Awaitable[T]) -> T:
        """Await `work`.

        The time in which `work` computes, or in which all code waits for it, counts towards `activity`.
        """
        self._waiting[activity] += 1
        try:
            return await HookedAwaitable(work, partial(self.enter, activity), self.leave)
        finally:
            self._waiting[activity] -= 1
            self._turn()

    def enter(self, activity: str) -> None:
        """Count the time from now on towards `activity`, until `leave` is called."""
        self._running.append(activity)
        self._turn()

    def leave(self) -> None:
        """End the activity that was entered most recently."""
        self._running.pop()
        self._turn()

    @contextmanager
    def phase(self, activity: str) -> Iterator[None]:
        """Return a context manager that counts the time inside the block towards `activity`."""
        self.enter(activity)
        try:
            yield
        finally:
            self.leave()

    def _turn(self) -> None:
        """Add the time up to now to the current activity, and select the next activity."""
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
