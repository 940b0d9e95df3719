"""Changing what an environment server holds while others play: only with a token, for it decides what the server runs."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pydantic

from kapelle.environment import Environment
from kapelle.errors import ConfigError, KapelleError
from kapelle.services.binding import TOKEN
from kapelle.services.environments.shelf import Held
from kapelle.services.grpc.refusals import Refused, wrong
from kapelle.setup.environment_forms import environment_from
from kapelle.wire import environment_v1_pb2 as pb
from kapelle.wire import environment_v1_pb2_grpc as pb_grpc

LONGEST_NAME = 128


class ControlService(pb_grpc.EnvironmentControlServicer):
    """See `EnvironmentControl` in the contract."""

    name = "kapelle.environment.v1.EnvironmentControl"

    def __init__(self, put: Callable[[str, Environment], Awaitable[Held]], *, guarded: bool) -> None:
        """Take what puts an environment on the shelf, and whether the server asks for a token."""
        self._put, self._guarded = put, guarded

    def register(self, server: grpc.aio.Server) -> None:
        """See `GrpcService`."""
        pb_grpc.add_EnvironmentControlServicer_to_server(self, server)

    async def settle(self) -> None:
        """See `GrpcService`: nothing stays."""

    async def Register(self, asked: pb.RegisterRequest, _: object) -> pb.Description:
        """See the contract."""
        if not self._guarded:
            raise Refused(
                "FAILED_PRECONDITION",
                f"This server asks for no token, so nobody may change what it runs. Start it with {TOKEN} set.",
            )
        if not asked.name.isprintable() or not 0 < len(asked.name) <= LONGEST_NAME:
            raise wrong(f"Name the environment: 1 to {LONGEST_NAME} printable characters.")
        try:
            return (await self._put(asked.name, made(asked.settings))).description
        except KapelleError as error:
            raise wrong(str(error)) from None


def made(settings: str) -> Environment:
    """Return the environment of settings in JSON; ConfigError for what is none."""
    try:
        values: Any = json.loads(settings)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"The settings are no JSON: {error}.") from None
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        raise ConfigError('The settings are no environment. Write them as {"name": "arithmetic", …}.')
    try:
        return environment_from({"class": values["name"], "settings": values})
    except pydantic.ValidationError as error:
        raise ConfigError(f"These are no settings of '{values['name']}': {error}") from None
