"""Episodes that an outside program plays, as their worlds see it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping

import pytest

from kapelle.environment import Outcome
from kapelle.environments.external import ExternalWorld, Program, Switchboard, WaitingEpisode
from kapelle.runtime.deadlines import GaveUp, within
from kapelle.runtime.event_loop import run_async
from kapelle.types import Task

LIMIT = 0.4
WAIT = 3 * LIMIT
"""Seconds before an episode is begun: long enough for the watchdog to end a call whose wait counts."""
TASK = Task("train-0", "", {"split": "train", "index": 0})


def world(board: Switchboard, *command: str, programs: int = 1) -> ExternalWorld:
    async def start(seat: WaitingEpisode, waits: Callable[[], bool]) -> Program:
        return await Program.start(command, seat, board.url, board.token)

    return ExternalWorld(board, TASK, 0, ("planner",), start if command else None, programs)


def bounded(world: ExternalWorld) -> Awaitable[Mapping[str, float]]:
    """Take a step as an episode does: inside a limit of the episode and one of the call."""

    async def episode() -> Mapping[str, float]:
        return await within("`step`", "environment", LIMIT, world.step({}))

    return asyncio.wait_for(within("The episode", "episode", LIMIT, episode()), 60)


async def taken(board: Switchboard, after: float) -> WaitingEpisode:
    await asyncio.sleep(after)
    seat = await asyncio.wrap_future(board.take())
    seat.take()
    return seat


def test_an_episode_that_no_program_has_taken_is_not_late() -> None:
    """Neither its call of the environment nor the episode has begun; both have once a program has it."""

    async def plays() -> None:
        board = Switchboard("", None)
        offered = world(board)
        step = asyncio.ensure_future(bounded(offered))
        seat = await taken(board, WAIT)
        seat.finish(Outcome({}))
        await step

    async def falls_silent() -> None:
        board = Switchboard("", None)
        step = asyncio.ensure_future(bounded(world(board)))
        await taken(board, 0.0)
        await step

    run_async(plays)
    with pytest.raises(GaveUp, match=r"took more than 0\.4 s"):
        run_async(falls_silent)


def test_an_episode_that_waits_for_a_free_program_is_not_late() -> None:
    async def both() -> None:
        board = Switchboard("", None)
        busy, waiting = (world(board, sys.executable, "-c", "import time; time.sleep(60)") for _ in range(2))
        first = asyncio.ensure_future(busy.step({}))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(bounded(waiting))
        await asyncio.sleep(WAIT)
        assert not second.done(), "it has no program yet"
        first.cancel()
        await asyncio.wait((first,))
        await busy.close()
        with pytest.raises(GaveUp, match=r"took more than 0\.4 s"):  # its own program is as slow
            await second
        await waiting.close()

    run_async(both)


def test_it_is_said_when_episodes_wait_and_nobody_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kapelle.environments.external.NOTICE_S", 0.05)
    said: list[str] = []

    async def wait() -> None:
        told = asyncio.Event()

        def say(line: str) -> None:
            said.append(line)
            told.set()

        board = Switchboard("http://127.0.0.1:9", None, say)
        steps = [asyncio.ensure_future(world(board).step({})) for _ in range(3)]
        await told.wait()
        await asyncio.sleep(0.2)  # the others have waited for as long
        for step in steps:
            step.cancel()
        await asyncio.wait(steps)

    run_async(wait)
    [line] = said
    assert line.startswith("3 episodes wait for a program")
    assert "POST http://127.0.0.1:9/v1/task" in line
