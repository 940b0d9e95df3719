"""Several environment servers behind one recipe: each world goes where the fewest are, and to another one when one dies."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kapelle.environment import WorkerLost, report_change
from kapelle.environments.remote.server import Busy, EnvironmentServerLink, Line
from kapelle.errors import ConfigError, EngineError
from kapelle.wire import environment_v1_pb2 as pb

SHORTEST_PAUSE = 0.05
"""Seconds between two looks for a server that may be asked."""


class Servers:
    """The servers of one `environment` section; any thread may ask."""

    def __init__(self, servers: Sequence[EnvironmentServerLink], name: str, retry_seconds: float) -> None:
        """Take the servers, the name of the environment there, and how long all of them may be unavailable."""
        self._servers, self._name, self._retry_seconds = list(servers), name, retry_seconds
        self._guard = threading.Lock()
        self._described: pb.Description | None = None
        self._versions: dict[str, tuple[int, str]] = {}
        """Address → the version and the content that it played last."""

    def describe(self) -> pb.Description:
        """Return what the environment is, as the servers say; ConfigError where they hold different ones."""
        with self._guard:
            if self._described is None:
                self._described = self._ask_all()
            return self._described

    def _ask_all(self) -> pb.Description:
        asked = pb.DescribeRequest(environment=self._name)
        first: pb.Description = self.call("Describe", asked, 60.0)
        for server in self._servers:
            try:
                said = server.call("Describe", asked, 10.0)
            except Busy:  # it may come later
                continue
            self._versions[server.address] = (said.version, said.content)
            if said.content != first.content:
                raise ConfigError(
                    f"The environment servers do not hold the same '{first.name}': the content is {first.content} at one of "
                    f"them and {said.content} at {server.address}. Start them with the same environment and settings."
                )
        return first

    def call(self, method: str, question: Any, seconds: float) -> Any:
        """Ask any server and wait for the answer; raises what `Server.call` raises, and EngineError if no server is reachable."""
        until = time.monotonic() + self._retry_seconds
        while True:
            for server in self._order():
                try:
                    return server.call(method, question, seconds)
                except Busy:
                    continue
            if time.monotonic() > until:
                raise self._nobody()
            time.sleep(SHORTEST_PAUSE)

    async def reset(self, question: pb.ResetRequest) -> tuple[EnvironmentServerLink, Line, pb.ResetReply]:
        """Open a session on a server with room; raises what the environment raised, and EngineError if no server is reachable."""
        until = time.monotonic() + self._retry_seconds
        while True:
            for server in self._order():
                server.sessions += 1
                try:
                    line, answer = server.reset(question)
                    began = await _answered(line, answer)
                except (Busy, WorkerLost) as gone:
                    server.sessions -= 1
                    if isinstance(gone, WorkerLost) and gone.blamed:
                        raise
                    server.rest(str(gone))
                    continue
                except BaseException:
                    server.sessions -= 1
                    raise
                server.answered()
                self._note(server, began.version)
                return server, line, began
            if time.monotonic() > until:
                raise self._nobody()
            await asyncio.sleep(SHORTEST_PAUSE)

    def _order(self) -> list[EnvironmentServerLink]:
        ready = [server for server in self._servers if server.ready]
        return sorted(ready, key=lambda server: server.sessions)

    def _note(self, server: EnvironmentServerLink, version: int) -> None:
        """Say once when a server plays another environment than before."""
        before = self._versions.get(server.address)
        if before is None or before[0] == version:
            self._versions.setdefault(server.address, (version, ""))
            return
        self._versions[server.address] = (version, "")
        report_change(
            f"environment '{self._name or self.describe().name}' at {server.address} is version {version} now, after "
            f"{before[0]}: episodes that begin from here on play the new one"
        )
        with self._guard:
            self._described = None  # asked for again when somebody wants to know

    def _nobody(self) -> EngineError:
        said = "; ".join(f"{server.address}: {server.asked_last or 'no answer'}" for server in self._servers)
        return EngineError(
            f"No environment server has answered for {self._retry_seconds:g} s ({said}). Start one with `kapelle serve "
            "environments`, see `environment.address`, or allow more time with `environment.retry_seconds`."
        )

    def close(self) -> None:
        """End all connections."""
        for server in self._servers:
            server.close()


async def _answered(line: Line, answer: Any) -> Any:
    """Wait for the answer to a reset; a cancelled wait closes the session."""
    try:
        return await asyncio.wrap_future(answer)
    except asyncio.CancelledError:
        answer.add_done_callback(lambda late: _close_late(line, late))
        raise


def _close_late(line: Line, late: Any) -> None:
    if late.exception() is None:
        try:
            line.ask(close=pb.CloseRequest(session=late.result().session))
        except WorkerLost:
            return


@lru_cache(maxsize=64)
def _shared(
    _process: int,
    addresses: tuple[str, ...],
    name: str,
    certificate: str | None,
    token: str | None,
    tls: tuple[bool, ...],
    retry_seconds: float,
) -> Servers:
    servers = [
        EnvironmentServerLink(address, certificate, token, tls=secure)
        for address, secure in zip(addresses, tls, strict=True)
    ]
    return Servers(servers, name, retry_seconds)


def servers_at(
    addresses: tuple[str, ...],
    name: str,
    certificate: str | None,
    token: str | None,
    tls: tuple[bool, ...],
    retry_seconds: float,
) -> Servers:
    """Return this process's connections to these servers: the same ones whenever they are asked for."""
    return _shared(os.getpid(), addresses, name, certificate, token, tls, retry_seconds)
