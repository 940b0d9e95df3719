"""An environment server with the tests' own environment, and a client that knows only the contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from tests.services.environments import slow_world

from kapelle.services.binding import Binding
from kapelle.services.environments.service import EnvironmentServer, serve_environments
from kapelle.services.environments.sessions import SessionLimits
from kapelle.wire import environment_v1_pb2 as pb
from kapelle.wire import environment_v1_pb2_grpc as pb_grpc

FAR = 60.0
"""Seconds that no test needs."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    slow_world.go_on.clear()
    slow_world.began.clear()
    slow_world.closed.clear()
    slow_world.heard.clear()
    yield
    slow_world.go_on.set()


@contextmanager
def served(binding: Binding | None = None, **given: Any) -> Iterator[EnvironmentServer]:
    with serve_environments({"it": slow_world.Waiting()}, binding or Binding(), **given) as server:
        yield server


@pytest.fixture
def server() -> Iterator[EnvironmentServer]:
    with served(limits=SessionLimits(sessions=3, idle_seconds=FAR, call_seconds=FAR)) as made:
        yield made


@contextmanager
def stub_of(server: EnvironmentServer) -> Iterator[Any]:
    with grpc.insecure_channel(server.address) as channel:
        yield pb_grpc.EnvironmentsStub(channel)


@pytest.fixture
def stub(server: EnvironmentServer) -> Iterator[Any]:
    with stub_of(server) as made:
        yield made


def reset(seed: int = 0, **more: Any) -> pb.ResetRequest:
    return pb.ResetRequest(agents=["ann", "ben"], pick=pb.Pick(split="train"), seed=seed, **more)


def says(session: str, text: str, agent: str = "ann", number: int | None = None) -> pb.ActRequest:
    return pb.ActRequest(session=session, moves=[pb.Move(agent=agent, text=text)], number=number)
