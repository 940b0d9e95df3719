"""Limits end with the event loop of their tasks, also those of tasks that were left behind."""

from __future__ import annotations

import asyncio

import pytest

from kapelle.runtime import event_loop
from kapelle.runtime.deadlines import watched_thread, within
from kapelle.runtime.event_loop import run_async


def test_a_task_left_behind_leaves_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "GRACE", 0.05)
    kept: list[asyncio.Task[None]] = []

    async def deaf() -> None:
        while True:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                continue

    async def bounded() -> None:
        await within("a call", "environment", 3600.0, deaf())

    async def work() -> None:
        kept.append(asyncio.create_task(bounded()))
        await asyncio.sleep(0)

    before = set(watched_thread().open)
    run_async(work)
    assert not kept[0].done()
    assert watched_thread().open <= before
