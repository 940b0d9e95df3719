"""The environment server as a whole: a shelf, a thread of worlds, and the port.

with serve_environments({"sums": Arithmetic()}, Binding(), SessionLimits()) as server:
    print(server.address)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from kapelle.environment import Environment
from kapelle.environments.bounded_worlds import open_world
from kapelle.rollout.workers.pool import EnvironmentWorkers
from kapelle.rollout.workers.session import OpenWorld
from kapelle.runtime.deadlines import Patience
from kapelle.services.binding import Binding
from kapelle.services.environments.control import ControlService
from kapelle.services.environments.service import EnvironmentService
from kapelle.services.environments.sessions import SessionLimits, Sessions
from kapelle.services.environments.shelf import Held, Shelf
from kapelle.services.grpc.guard import Caps
from kapelle.services.grpc.server import GrpcServer
from kapelle.services.policy.engine_thread import EngineThread

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
