"""An environment served to OpenEnv's clients: our own client, callers without a token, and invalid messages.

`tests/apps` has the package's client.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from tests.support.hostile_bodies import bodies
from tests.workflows.stage import lines, play

from kapelle.environments.adapters.openenv import OpenEnv
from kapelle.environments.arithmetic import Arithmetic
from kapelle.services.binding import Binding
from kapelle.services.environments.openenv import serve_openenv
from kapelle.workflows.play import PlayWorkflow


def test_our_own_client_runs_an_episode() -> None:
    with serve_openenv(Arithmetic(), ("solver",), Binding()) as server:
        environment = OpenEnv(url=server.url, observation="text")
        task = environment.task("train", 1)
        question = Arithmetic().task("train", 2)
        scripts = {"a": lines(str(question.data["answer"]))}
        (episode,) = asyncio.run(play(environment, PlayWorkflow(), ["a"], scripts, task))
        assert episode.error is None
        assert episode.turns[0].new_messages[-1].content == question.question
        assert episode.turns[0].reward == 1.0


def test_invalid_messages_are_answered_and_callers_without_a_token_rejected() -> None:
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


COUNT = int(os.environ.get("KAPELLE_HOSTILE_BODIES", "150"))
"""Broken messages of each kind; before a release 20,000."""
RESET = {"seed": 1, "split": "train", "index": 3, "episode_id": "x"}
STEP = {"message": "7", "agent": "solver"}


@pytest.mark.parametrize(
    "good", [{"type": "reset", "data": RESET}, {"type": "step", "data": STEP}, {"type": "state", "data": {}}]
)
async def test_every_broken_message_is_answered(good: dict[str, Any]) -> None:
    """The WebSocket stays open. Bodies that are no text are skipped."""
    from websockets.asyncio.client import connect

    with serve_openenv(Arithmetic(), ("solver",), Binding()) as server:
        async with connect(server.url.replace("http", "ws") + "/ws") as socket:

            async def reply(text: str) -> dict[str, Any]:
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
                    assert (await reply('{"type": "reset", "data": {}}'))["type"] == "observation"
                answer = await reply(text)
                if answer["type"] == "error":
                    refused += 1
                    codes = ("INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR")
                    assert answer["data"]["code"] in codes, (answer, text[:200])
            assert refused > COUNT // 3
