"""Every moment of a step counts once, with a clock that the test controls."""

from __future__ import annotations

import asyncio
import time

import pytest

from kapelle.runs.timeline import Timeline


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


def nonzero(line: Timeline) -> dict[str, float]:
    return {name: seconds for name, seconds in line.seconds().items() if seconds}


def test_other_time_is_idle(clock: Clock) -> None:
    line = Timeline()
    clock.now += 2
    line.enter("update")
    clock.now += 3
    line.enter("score")
    clock.now += 5
    line.leave()
    clock.now += 7
    line.leave()
    clock.now += 11
    assert nonzero(line) == {"update": 10, "score": 5, "idle": 13}
    assert sum(line.seconds().values()) == clock.now


async def test_time_counts_as_the_running_or_awaited_activity(clock: Clock) -> None:
    line, gate = Timeline(), asyncio.Event()

    async def sampled() -> str:
        clock.now += 1
        await gate.wait()
        clock.now += 2
        return "said"

    async def played() -> None:
        clock.now += 4
        await asyncio.sleep(0)
        clock.now += 8
        gate.set()

    said, _ = await asyncio.gather(line.during("generate", sampled()), line.during("environment", played()))
    assert said == "said"
    assert nonzero(line) == {"generate": 3, "environment": 12}


async def test_among_awaited_activities_generation_comes_first(clock: Clock) -> None:
    line, gate = Timeline(), asyncio.Event()
    both = asyncio.gather(line.during("grade", gate.wait()), line.during("generate", gate.wait()))
    await asyncio.sleep(0)
    clock.now += 5
    gate.set()
    await both
    clock.now += 1
    assert nonzero(line) == {"generate": 5, "idle": 1}


async def test_errors_and_cancellation_end_an_activity(clock: Clock) -> None:
    line = Timeline()

    async def broken() -> None:
        await asyncio.sleep(0)
        clock.now += 1
        raise ValueError("gone")

    async def patient() -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            clock.now += 2
            raise

    with pytest.raises(ValueError, match="gone"):
        await line.during("environment", broken())
    task = asyncio.ensure_future(line.during("generate", patient()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    clock.now += 4
    assert nonzero(line) == {"environment": 1, "generate": 2, "idle": 4}


async def test_work_may_handle_an_error(clock: Clock) -> None:
    line = Timeline()

    async def forgiving() -> str:
        done = asyncio.get_running_loop().create_future()
        done.set_exception(ValueError("gone"))
        try:
            await done
        except ValueError:
            await asyncio.sleep(0)
            return "went on"
        return "never"

    assert await line.during("grade", forgiving()) == "went on"
