"""Ray at the edge of this project."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kapelle.cluster.actors import ActorConnection
from kapelle.errors import ConfigError, EngineError

SLOW = "The current node timed out during startup."
"""What Ray raises, as a bare Exception, where its services take longer than half a minute."""


def test_a_ray_that_starts_too_slowly_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def slow(**_given: object) -> None:
        raise Exception(SLOW)  # noqa: TRY002 - as Ray does

    monkeypatch.setattr(ray, "init", slow)
    with pytest.raises(EngineError, match=f"Ray did not start on this machine: {SLOW[:-1]}. On a busy"):
        ActorConnection.start(tmp_path)
    with pytest.raises(EngineError, match=f"`ray.address: auto` did not answer in time: {SLOW[:-1]}. Is"):
        ActorConnection.join("auto")


def test_an_address_that_nobody_answers_is_said_at_once() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=f"No Ray answers at `ray.address: {address}`: Connection refused"
        ):
            ActorConnection.join(address)
