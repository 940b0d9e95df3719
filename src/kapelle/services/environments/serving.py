"""The environment server as a whole: a shelf, a thread of worlds, and the port.

with serve_environments({"sums": Arithmetic()}, Binding(), SessionLimits()) as server:
    print(server.address)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pydantic

from kapelle.environment import Environment
from kapelle.environments.bounded_worlds import open_world
from kapelle.errors import ConfigError, KapelleError
from kapelle.rollout.workers.pool import EnvironmentWorkers
from kapelle.rollout.workers.session import OpenWorld
from kapelle.runtime.deadlines import Patience
from kapelle.services.binding import TOKEN, Binding
from kapelle.services.environments.service import EnvironmentService
from kapelle.services.environments.sessions import SessionLimits, Sessions
from kapelle.services.environments.shelf import Held, Shelf
from kapelle.services.grpc.refusals import Refused, wrong
from kapelle.services.grpc.server import Caps, GrpcServer
from kapelle.services.policy.engine_thread import EngineThread
from kapelle.setup.environment_forms import environment_from
from kapelle.wire import environment_v1_pb2 as pb
from kapelle.wire import environment_v1_pb2_grpc as pb_grpc

# -------- Changing what an environment server holds while others play: only with a token, for it decides what the server runs

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


__all__ = ["EnvironmentServer", "SessionLimits", "serve_environments"]

CLOSING_SECONDS = 5.0
"""That worlds have to close when the server has ended."""


class _Worlds:
    """Where the worlds of each environment live: on this process's thread, or in processes of their own."""

    def __init__(self, processes: int, limits: SessionLimits) -> None:
        self._processes, self._limits = processes, limits
        self._pools: dict[int, tuple[Held, EnvironmentWorkers]] = {}

    def opens(self, held: Held) -> OpenWorld:
        if not self._processes:
            return open_world
        if id(held) not in self._pools:
            patience = Patience(environment=self._limits.call_seconds)
            self._pools[id(held)] = (held, EnvironmentWorkers(held.environment, self._processes, patience))
        return self._pools[id(held)][1].open_world

    def retire(self, name: str, sessions: Sessions) -> list[EnvironmentWorkers]:
        """Return the pools of an environment that no session plays any more, and forget them."""
        old = {
            key: pool
            for key, (held, pool) in self._pools.items()
            if held.description.name == name and not sessions.playing(held)
        }
        for key in old:
            del self._pools[key]
        return list(old.values())

    def close(self) -> None:
        for _, pool in self._pools.values():
            pool.close()


@dataclass(frozen=True, slots=True)
class EnvironmentServer:
    """An environment server that listens."""

    address: str
    shelf: Shelf
    grpc: GrpcServer
    sessions: Sessions

    def drain(self, seconds: float) -> bool:
        """Begin no more sessions, play open ones for half the time, and answer what was asked; whether all was."""
        return self.grpc.drain(seconds)


@contextmanager
def serve_environments(
    environments: Mapping[str, Environment],
    binding: Binding,
    limits: SessionLimits | None = None,
    caps: Caps | None = None,
    processes: int = 0,
) -> Iterator[EnvironmentServer]:
    """Serve environments by name while the block runs; their worlds live in so many processes, 0 for this one.

    Raises ConfigError when the port is taken or an extra is missing, DataError for data that cannot be read.
    """
    limits = limits or SessionLimits()
    with ExitStack() as closing:
        shelf = Shelf(environments)
        sessions = Sessions(closing.enter_context(EngineThread()), limits)
        worlds = _Worlds(processes, limits)
        closing.callback(worlds.close)
        closing.callback(sessions.close_all, CLOSING_SECONDS)

        async def put(name: str, environment: Environment) -> Held:
            async def placed() -> Held:
                return shelf.put(name, environment)

            held = await sessions.beside(placed)
            for pool in worlds.retire(name, sessions):
                await asyncio.to_thread(pool.close)
            return held

        service = EnvironmentService(shelf, sessions, worlds.opens)
        control = ControlService(put, guarded=binding.token is not None)
        caps = caps or Caps(streams=limits.sessions)
        with GrpcServer(binding, [service, control], caps) as server:
            yield EnvironmentServer(server.address, shelf, server, sessions)
