"""Episodes of outside programs: what counts towards time limits, messages to the user, and the server's settings."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from kapelle.environment import Outcome
from kapelle.environments.external import (
    External,
    ExternalState,
    Switchboard,
    WaitingEpisode,
)
from kapelle.environments.programs.processes import Program
from kapelle.errors import ConfigError
from kapelle.runtime.deadlines import DeadlineExceeded, within
from kapelle.runtime.event_loop import run_async
from kapelle.types import Task

LIMIT = 0.3
WAIT = 2 * LIMIT
"""Seconds before an episode begins: longer than the limit, which must not count them."""
TASK = Task("train-0", "", {"split": "train", "index": 0})


def world(board: Switchboard, *command: str, programs: int = 1) -> ExternalState:
    async def start(episode: WaitingEpisode, waits: Callable[[], bool]) -> Program:
        return await Program.start(command, {}, {})

    return ExternalState(board, TASK, 0, ("planner",), start if command else None, programs)


def bounded(world: ExternalState) -> Awaitable[Mapping[str, float]]:
    """Take a step within the limits of the episode and of the call."""

    async def episode() -> Mapping[str, float]:
        return await within("`step`", "environment", LIMIT, world.step({}))

    return asyncio.wait_for(within("The episode", "episode", LIMIT, episode()), 60)


async def taken(board: Switchboard, after: float) -> WaitingEpisode:
    await asyncio.sleep(after)
    episode = await asyncio.wrap_future(board.take())
    episode.take()
    return episode


def test_the_wait_for_a_program_counts_towards_no_limit() -> None:
    async def waits() -> None:
        board = Switchboard("", None)
        step = asyncio.ensure_future(bounded(world(board)))
        episode = await taken(board, WAIT)
        episode.finish(Outcome({}))
        await step

    async def is_silent() -> None:
        board = Switchboard("", None)
        step = asyncio.ensure_future(bounded(world(board)))
        await taken(board, 0.0)
        await step

    run_async(waits)
    with pytest.raises(DeadlineExceeded, match=r"0\.3 s"):
        run_async(is_silent)


def test_the_wait_for_a_free_program_counts_towards_no_limit() -> None:
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
        with pytest.raises(DeadlineExceeded, match=r"0\.3 s"):
            await second
        await waiting.close()

    run_async(both)


def test_one_message_reports_that_episodes_wait() -> None:
    messages: list[str] = []

    async def wait() -> None:
        board = Switchboard("http://127.0.0.1:9", None, messages.append)
        steps = [asyncio.ensure_future(world(board).step({})) for _ in range(3)]
        await asyncio.sleep(0)
        for _ in steps:
            board.warn_if_idle()
        for step in steps:
            step.cancel()
        await asyncio.wait(steps)

    run_async(wait)
    [message] = messages
    assert message.startswith("3 episodes")
    assert "POST http://127.0.0.1:9/v1/task" in message


@pytest.mark.parametrize("settings", [{"port": 0}, {"command": ["x"]}])
def test_several_processes_need_a_command_and_free_ports(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="2 processes"):
        External.model_validate(settings).check_server(2)
    External(command=("x",), port=0).check_server(2)
