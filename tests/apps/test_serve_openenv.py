"""Environments of kapelle's, played by the real client of openenv-core and by our own (`make test-apps`)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.workflows.stage import lines, play

from kapelle.environments.adapters.openenv import OpenEnv
from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.matrix import Matrix
from kapelle.services.binding import Binding
from kapelle.services.environments.openenv import serve_openenv
from kapelle.workflows.play import PlayWorkflow

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


@pytest.mark.parametrize("transport", ["websocket", "http"])
def test_our_own_client_plays_it_too(transport: Any) -> None:
    with serve_openenv(Arithmetic(), ("solver",), Binding()) as server:
        environment = OpenEnv(url=server.url, observation="text", transport=transport)
        task = environment.task("train", 1)
        question = Arithmetic().task("train", 2)
        said = {"a": lines(str(question.data["answer"]))}
        (episode,) = asyncio.run(play(environment, PlayWorkflow(), ["a"], said, task))
        assert episode.error is None
        assert episode.turns[0].heard[-1].content == question.question
        assert episode.turns[0].reward == 1.0


def test_nonsense_is_answered_and_strangers_are_not() -> None:
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidStatus

    token = "a token of twenty letters"  # noqa: S105 - of this test
    binding = Binding(token=token)
    with serve_openenv(Arithmetic(), ("solver",), binding) as server:
        address = server.url.replace("http", "ws") + "/ws"
        bearer = {"Authorization": f"Bearer {token}"}

        async def run() -> None:
            for headers in ({}, {"Authorization": "Bearer x"}, {**bearer, "Origin": "http://evil.example"}):
                with pytest.raises(InvalidStatus):
                    await connect(address, additional_headers=headers)
            async with connect(address, additional_headers=bearer) as socket:
                for text, code in (
                    ("{", "INVALID_JSON"),
                    ("[" * 100_000, "INVALID_JSON"),
                    ("3", "UNKNOWN_TYPE"),
                    ('{"type": "dance"}', "UNKNOWN_TYPE"),
                    ('{"type": "reset", "data": 3}', "VALIDATION_ERROR"),
                    ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
                    ('{"type": "reset", "data": {"seed": 1e9}}', "VALIDATION_ERROR"),
                    ('{"type": "reset", "data": {"split": "dev"}}', "VALIDATION_ERROR"),
                    ('{"type": "step", "data": {"message": "7"}}', "VALIDATION_ERROR"),
                ):
                    await socket.send(text)
                    assert json.loads(await socket.recv())["data"]["code"] == code

        asyncio.run(run())
