"""The time in a queue for a scarce resource does not count for a call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from tests.engines.rollout.local.test_joining import engine, request
from tests.support.tiny import LORA, tiny_model

from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.pool import Pool
from kapelle.environments.sandbox.unsafe_subprocess import UnsafeSubprocess
from kapelle.runtime.deadlines import DeadlineExceeded, pause_deadline, within
from kapelle.runtime.event_loop import run_async

LIMIT = 0.2
LINE = 3 * LIMIT
"""Seconds in the queue: long enough for the watchdog to end a call whose queue time counts."""


def bounded(work: Awaitable[object]) -> Awaitable[object]:
    return within("The call", "engine", LIMIT, work)


def test_only_the_time_in_the_queue_does_not_count() -> None:
    async def call(line: float, work: float) -> str:
        turn = pause_deadline()
        await asyncio.sleep(line)
        turn()
        await asyncio.sleep(work)
        return "done"

    assert run_async(lambda: asyncio.wait_for(bounded(call(LINE, 0)), 60)) == "done"
    with pytest.raises(DeadlineExceeded, match="more than"):
        run_async(lambda: asyncio.wait_for(bounded(call(0, 60)), 60))
    with pytest.raises(DeadlineExceeded):
        run_async(lambda: asyncio.wait_for(bounded(call(LINE, 60)), 60))


async def at_the_same_time(first: Callable[[], Awaitable[object]], second: Awaitable[object]) -> object:
    before = asyncio.ensure_future(first())
    await asyncio.sleep(0)
    answer = await bounded(second)
    await before
    return answer


def test_waiting_for_a_sandbox_does_not_count() -> None:
    async def both(pool: Pool) -> object:
        return await at_the_same_time(lambda: pool.call(lambda: time.sleep(LINE)), pool.call(lambda: "ran"))

    with Pool(UnsafeSubprocess(), Limits(), parallel=1, warm=0) as pool:
        assert run_async(lambda: both(pool)) == "ran"


def test_waiting_for_a_row_does_not_count() -> None:
    model = tiny_model()
    for name in ("a", "b"):
        model.bank.add(name, LORA, 1)
    full = engine(model, max_rows=0)  # no one's turn comes

    async def asked() -> object:
        asyncio.get_running_loop().call_later(LINE, setattr, full, "max_rows", 4)
        return await bounded(full.generate(request("a", 1, 3)))

    assert run_async(asked) is not None
