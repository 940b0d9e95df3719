"""Putting an environment on a server that runs."""

from __future__ import annotations

import grpc
import pydantic

from kapelle.environments.remote import Remote
from kapelle.environments.remote.server import channel_to, metadata_of
from kapelle.errors import ConfigError, EngineError
from kapelle.wire import environment_v1_pb2 as pb
from kapelle.wire import environment_v1_pb2_grpc as pb_grpc

SECONDS = 600.0
"""For which the server may read the environment's data."""


def register(address: str, name: str, settings: str, certificate: str | None) -> int:
    """Add or replace an environment, given as settings in JSON; return its version.

    Raises ConfigError where the server refuses, EngineError where it does not answer.
    """
    try:
        calling = Remote(address=(address,), certificate=certificate).calling
    except pydantic.ValidationError as error:
        raise ConfigError(f"The server cannot be called: {error.errors()[0]['msg']}.") from None
    with channel_to(address, certificate, tls=calling.tls[0]) as channel:
        try:
            asked = pb.RegisterRequest(name=name, settings=settings)
            said = pb_grpc.EnvironmentControlStub(channel).Register(
                asked, timeout=SECONDS, metadata=metadata_of(calling.token)
            )
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise EngineError(
                    f"The environment server at {address} does not answer: {error.details()}."
                ) from None
            raise ConfigError(f"The environment server at {address} refuses: {error.details()}") from None
    return int(said.version)
