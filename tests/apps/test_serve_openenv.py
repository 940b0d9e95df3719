"""Environments of kapelle's, played by the real client of openenv-core and by our own (`make test-apps`)."""

from __future__ import annotations

import asyncio

import pytest

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.matrix import Matrix
from kapelle.services.binding import Binding
from kapelle.services.environments.openenv import serve_openenv

pytestmark = pytest.mark.apps
clients = pytest.importorskip("openenv.core.generic_client")


def test_the_packages_own_client_plays_a_question() -> None:
    environment = Arithmetic()
    with serve_openenv(environment, ("solver",), Binding()) as server:

        async def run() -> None:
            async with clients.GenericEnvClient(base_url=server.url) as client:
                began = await client.reset(seed=3, split="test")
                task = environment.task("test", 3)
                assert began.observation["text"] == task.question
                assert (began.observation["agent"], began.done, began.reward) == ("solver", False, None)
                with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
                    await client.step({"text": "7"})
                ended = await client.step({"message": str(task.data["answer"])})
                assert (ended.done, ended.reward, ended.observation["success"]) == (True, 1.0, 1.0)
                assert (await client.state())["step_count"] == 1
                with pytest.raises(RuntimeError, match="reset first"):
                    await client.step({"message": "7"})
                again = await client.reset(seed=3, split="test")
                assert again.observation == began.observation

        asyncio.run(run())


def test_agents_that_move_at_once_are_heard_one_after_another() -> None:
    environment = Matrix(game="prisoners_dilemma")
    with serve_openenv(environment, ("a", "b"), Binding()) as server:

        async def run() -> None:
            async with clients.GenericEnvClient(base_url=server.url) as client:
                began = await client.reset(seed=0)
                assert began.observation["movers"] == ["a", "b"]
                first = await client.step({"message": "C", "agent": "b"})
                assert (first.reward, first.observation["movers"]) == (0.0, ["a"])
                last = await client.step({"message": "D"})
                assert last.done
                rewards = last.observation["rewards"]
                assert rewards["a"] > rewards["b"]
                assert last.reward == rewards["a"]

        asyncio.run(run())
