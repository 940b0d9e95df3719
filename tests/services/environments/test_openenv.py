"""An environment served to OpenEnv's clients: played by our own client, and what strangers and nonsense get.

The package's own client plays it in `tests/apps`.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from tests.support.hostile_bodies import answered, bodies, check_refused
from tests.workflows.stage import lines, play

from kapelle.environments.adapters.openenv import OpenEnv
from kapelle.environments.arithmetic import Arithmetic
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.event_loop import LoopThread
from kapelle.services.binding import Binding
from kapelle.services.environments.openenv import OpenEnvApplication, serve_openenv
from kapelle.workflows.play import PlayWorkflow


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


COUNT = int(os.environ.get("KAPELLE_HOSTILE_BODIES", "300"))
"""Broken bodies of each route; before a release 20,000."""
RESET = {"seed": 1, "split": "train", "index": 3, "episode_id": "x"}
STEP = {"message": "7", "agent": "solver"}


@pytest.mark.parametrize(("path", "good"), [("/reset", RESET), ("/step", {"action": STEP, "timeout_s": 3})])
async def test_every_broken_body_is_refused(path: str, good: dict[str, Any]) -> None:
    with LoopThread() as worlds:
        patience = Patience(environment=60, grader=60)
        application = OpenEnvApplication(Arithmetic(), ("solver",), Binding(), worlds, patience)
        refused = 0
        for body in bodies(good, COUNT):
            if path == "/step":
                status, said = await answered(application, "/reset", b"{}")
                assert status == 200, said
            status, said = await answered(application, path, body)
            if status != 200:
                refused += 1
                check_refused(status, said, body)
        assert refused > COUNT // 3


@pytest.mark.parametrize(
    "good", [{"type": "reset", "data": RESET}, {"type": "step", "data": STEP}, {"type": "state", "data": {}}]
)
async def test_every_broken_message_is_answered(good: dict[str, Any]) -> None:
    """Over one WebSocket, which stays open; what is no text never comes as one."""
    from websockets.asyncio.client import connect

    with serve_openenv(Arithmetic(), ("solver",), Binding()) as server:
        async with connect(server.url.replace("http", "ws") + "/ws") as socket:

            async def told(text: str) -> dict[str, Any]:
                await socket.send(text)
                answer: dict[str, Any] = json.loads(await socket.recv())
                return answer

            refused = 0
            for body in bodies(good, COUNT):
                try:
                    text = body.decode()
                except UnicodeDecodeError:
                    continue
                if good["type"] == "step":
                    assert (await told('{"type": "reset", "data": {}}'))["type"] == "observation"
                answer = await told(text)
                if answer["type"] == "error":
                    refused += 1
                    codes = ("INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR")
                    assert answer["data"]["code"] in codes, (answer, text[:200])
            assert refused > COUNT // 3
