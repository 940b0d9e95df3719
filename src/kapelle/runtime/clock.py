"""Measure time limits without the time in which this process was stopped.

A process is paused when a laptop is closed or when the process receives SIGSTOP. If the time limit continued during the pause,
correct code would fail. Code that waits therefore reads the clock often. If the time between two readings is longer than a busy
machine can explain, only one normal interval is counted.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO

LOOK_EVERY_S = 0.05
"""Maximum time in seconds between two readings of the clock by code that waits."""
LOOK_EVERY_TURN_S = 0.25
"""Maximum time in seconds between two readings of the clock in an event loop, where many tasks wait at the same time."""
_STOPPED = 5
"""Factor for the time between two readings: after this multiple of the maximum, the process must have been stopped."""


class SuspendAwareClock:
    """A clock that counts the seconds since its creation, without the time in which this process was stopped.

    Waiting code must call `now` every `look_every_s` seconds.
    """

    def __init__(self, look_every_s: float = LOOK_EVERY_S) -> None:
        self._look_every_s = look_every_s
        self._looked = time.monotonic()
        self._seconds = 0.0

    def now(self) -> float:
        """Return the number of seconds counted so far."""
        looked = time.monotonic()
        passed = looked - self._looked
        self._seconds += passed if passed < _STOPPED * self._look_every_s else self._look_every_s
        self._looked = looked
        return self._seconds


def wait_readable(source: int | IO[bytes], clock: SuspendAwareClock, until: float) -> bool:
    """Wait until `source` can be read or has ended, at most until the clock reaches `until`, and return whether it can be read."""
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while True:
            left = until - clock.now()
            # Check once more after the limit: data that arrived while this process was stopped counts as in time.
            if selector.select(max(min(left, LOOK_EVERY_S), 0.0)):
                return True
            if left <= 0:
                return False


@asynccontextmanager
async def suspend_aware_timeout(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError inside the block after the event loop has run for this many seconds.

    Time in which the process was stopped is not counted.
    """
    clock = SuspendAwareClock(LOOK_EVERY_TURN_S)
    loop = asyncio.get_running_loop()
    next_look: asyncio.TimerHandle | None = None
    async with asyncio.timeout(None) as bound:

        def look() -> None:
            nonlocal next_look
            left = seconds - clock.now()
            if left <= 0:
                bound.reschedule(loop.time())
            else:
                next_look = loop.call_later(min(left, LOOK_EVERY_TURN_S), look)

        look()
        try:
            yield
        finally:
            if next_look is not None:
                next_look.cancel()
