"""Ray at the edge of this project."""

from __future__ import annotations

import socket

import pytest

from kapelle.cluster.actors import Connection
from kapelle.errors import ConfigError


def test_an_address_that_nobody_answers_is_said_at_once() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=f"No Ray answers at `ray.address: {address}`: Connection refused"
        ):
            Connection.join(address)
