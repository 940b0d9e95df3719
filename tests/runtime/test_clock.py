"""A stopped process makes no program, tool, judge or server fail."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kapelle.runtime.clock import SuspendAwareClock, suspend_aware_timeout


def test_the_clock_counts_waits_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100.0, 100.1, 100.2, 4100.2, 4100.3])
    # The module's own name for it: the watchdog of this process asks the true clock meanwhile.
    monkeypatch.setattr("kapelle.runtime.clock.time", SimpleNamespace(monotonic=lambda: next(moments)))
    clock = SuspendAwareClock(0.05)
    assert [round(clock.now(), 9) for _ in range(4)] == [0.1, 0.2, 0.25, 0.35]


async def test_only_a_late_wait_in_the_event_loop_ends() -> None:
    with pytest.raises(TimeoutError):
        async with suspend_aware_timeout(0.05):
            await asyncio.sleep(60)
    async with suspend_aware_timeout(60):
        await asyncio.sleep(0.001)
