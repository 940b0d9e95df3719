"""An environment server with a test environment, and a client by the protocol alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from tests.services.environments import slow_world
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from kapelle.services.binding import Binding
from kapelle.services.environments.host import SessionLimits
from kapelle.services.environments.service import EnvironmentServer, serve_environments

FAR = 60.0
"""A timeout that no test reaches."""


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + FAR
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


class Caller:
    """One connection to a server; returns answers by the number of the request."""

    def __init__(self, socket: Connection) -> None:
        self.socket = socket
        self._numbers = count(1)
        self._arrived: dict[int, dict[str, Any]] = {}

    def send(self, call: str, **fields: Any) -> int:
        number = next(self._numbers)
        self.socket.send(json.dumps({"id": number, "call": call, **fields}))
        return number

    def answer(self, number: int) -> dict[str, Any]:
        while number not in self._arrived:
            answer = json.loads(self.socket.recv(timeout=FAR))
            self._arrived[answer.pop("id")] = answer
        return self._arrived.pop(number)

    def ask(self, call: str, **fields: Any) -> Any:
        """Return the value of the answer to a request."""
        answer = self.answer(self.send(call, **fields))
        assert set(answer) == {"value"}, answer
        return answer["value"]

    def reset(self, session: int = 1, seed: int = 0, **more: Any) -> Any:
        return self.ask("reset", session=session, seed=seed, agents=["ann", "ben"], index=0, **more)

    def says(self, text: str, session: int = 1) -> Any:
        return self.ask("act", session=session, actions={"ann": text})

    def refused(self, call: str, **fields: Any) -> tuple[int, str]:
        answer = self.answer(self.send(call, **fields))
        assert set(answer) == {"refused"}, answer
        status, message = answer["refused"]
        return status, message


@contextmanager
def calling(server: EnvironmentServer, token: str | None = None, **headers: str) -> Iterator[Caller]:
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    url = f"ws://{server.address}/v1/worlds"
    with connect(url, additional_headers=headers, compression=None, proxy=None) as socket:
        yield Caller(socket)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    slow_world.go_on.clear()
    slow_world.began.clear()
    slow_world.closed.clear()
    slow_world.new_messages.clear()
    yield
    slow_world.go_on.set()


@contextmanager
def served(binding: Binding | None = None, **given: Any) -> Iterator[EnvironmentServer]:
    with serve_environments({"it": slow_world.Waiting()}, binding or Binding(), **given) as server:
        yield server


@pytest.fixture
def server() -> Iterator[EnvironmentServer]:
    with served(limits=SessionLimits(sessions=3, call_seconds=FAR)) as made:
        yield made


@pytest.fixture
def caller(server: EnvironmentServer) -> Iterator[Caller]:
    with calling(server) as made:
        yield made
