"""Waiting that does not count the time in which this process was stopped.

A trainer may be paused by closing a laptop or by SIGSTOP. It could not receive what it was waiting for meanwhile, and
a limit that kept running would fail correct work. So waiting code looks at the clock often, and a time between two
looks that is longer than even a busy machine would take counts as one ordinary interval.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO

LOOK_EVERY_S = 0.05
"""Most seconds between two looks at the clock while waiting."""
LOOK_EVERY_TURN_S = 0.25
"""The same in an event loop, where many wait at once."""
_STOPPED = 5
"""How many times as long between two looks only a process is that was stopped."""


class SuspendAwareClock:
    """Seconds since it was made, without those in which this process did not run.

    Waiting code must call `now` every `look_every_s` seconds.
    """

    def __init__(self, look_every_s: float = LOOK_EVERY_S) -> None:
        self._look_every_s = look_every_s
        self._looked = time.monotonic()
        self._seconds = 0.0

    def now(self) -> float:
        """Return the seconds that count so far."""
        looked = time.monotonic()
        passed = looked - self._looked
        self._seconds += passed if passed < _STOPPED * self._look_every_s else self._look_every_s
        self._looked = looked
        return self._seconds


def wait_readable(source: int | IO[bytes], clock: SuspendAwareClock, until: float) -> bool:
    """Wait until there is something to read, or the end, or the clock reaches `until`; return whether there is."""
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while True:
            left = until - clock.now()
            # A last look after the time is up: what came while this process was stopped has come in time.
            if selector.select(max(min(left, LOOK_EVERY_S), 0.0)):
                return True
            if left <= 0:
                return False


@asynccontextmanager
async def suspend_aware_timeout(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError inside the block after so many seconds in which the event loop of this process ran."""
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
