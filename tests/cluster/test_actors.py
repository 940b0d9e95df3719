"""The interface to Ray."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import cast

import pytest

from kapelle.cluster import actors
from kapelle.cluster.actors import Actor, ActorCall, ActorConnection, ActorLost, StartedWorker, Waiting
from kapelle.errors import ConfigError, EngineError

SLOW = "The current node timed out during startup."
"""The message of the Exception that Ray raises if its services take longer than half a minute."""


def test_a_slow_start_of_ray_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def slow(**_given: object) -> None:
        raise Exception(SLOW)  # noqa: TRY002 - as Ray does

    monkeypatch.setattr(ray, "init", slow)
    with pytest.raises(EngineError, match=f"Ray did not start on this machine: {SLOW[:-1]}. Try again"):
        ActorConnection.start(tmp_path)
    with pytest.raises(
        EngineError, match=f"`ray.address: auto` did not answer in time: {SLOW[:-1]}. Try again"
    ):
        ActorConnection.join("auto")


def test_an_unreachable_address_is_reported_at_once() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=f"No Ray cluster answers at `ray.address: {address}`: Connection refused"
        ):
            ActorConnection.join(address)


class Call(ActorCall):
    """A call whose answer the test sets."""

    def __init__(self, *, done: bool = True) -> None:
        super().__init__(None)
        self.done = done


def started(*, up: bool, begun: float) -> StartedWorker:
    return StartedWorker(cast("Actor", None), Call(), Call(done=up), begun)


def test_a_worker_without_room_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        actors, "first_answered", lambda request, _: next((c for c in request if c.done), None)
    )
    waiting = Waiting("scoring worker", "ray.scoring", timeout=5.0)
    now = time.monotonic()
    answer = Call()
    there, late = started(up=True, begun=now - 9), started(up=False, begun=now - 4)
    assert waiting.first([there, late], [Call(done=False), answer]) is answer
    assert there.up is None, "it has answered, and may work for as long as it needs"
    assert waiting.first([there, late], [Call(done=False)]) is None
    late.begun -= 2
    with pytest.raises(EngineError, match=r"A scoring worker did not start within 5 s \(`ray.timeout`\)"):
        waiting.first([there, late], [answer])


def test_deaths_are_counted_in_a_row() -> None:
    waiting = Waiting("sampling worker", "ray.pools.big", 5.0, of=" of the pool 'big'")
    for _ in range(2):
        for _ in range(actors.DEATHS - 1):
            waiting.died(ActorLost("it was killed"))
        waiting.answered()
    for _ in range(actors.DEATHS - 1):
        waiting.died(ActorLost("it was killed"))
    with pytest.raises(EngineError, match=r"5 sampling workers of the pool 'big' .*`ray\.pools\.big`"):
        waiting.died(ActorLost("it was killed"))
