"""An environment served to OpenEnv's clients: played by our own client, and what strangers and nonsense get.

The package's own client plays it in `tests/apps`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.workflows.stage import lines, play

from kapelle.environments.adapters.openenv import OpenEnv
from kapelle.environments.arithmetic import Arithmetic
from kapelle.services.binding import Binding
from kapelle.services.environments.openenv import serve_openenv
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
