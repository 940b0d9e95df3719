"""Implements the environment server, which provides environments to runs on this and other machines over the protocol of `wire/worlds.py`.

    with serve_environments({"sums": Arithmetic()}, Binding(), SessionLimits()) as server:
        print(server.address)

The requests are described in `docs/environment_server.md`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from kapelle.environment import Environment
from kapelle.errors import EpisodeError
from kapelle.rollout.workers.session import OpenSessions, error_form
from kapelle.runtime.event_loop import LoopThread
from kapelle.runtime.wire.worlds import LARGEST, PATH, from_text, to_text
from kapelle.services.binding import Binding, log_failure
from kapelle.services.environments.host import (
    EnvironmentHost,
    EnvironmentRegistry,
    Raised,
    SessionLimits,
    shutting_down,
)
from kapelle.services.http import Call, HttpServer, JsonAnswer, route
from kapelle.services.request_errors import RequestError, wrong
from kapelle.services.sockets import SocketApplication, socket_server


class Connection:
    """The connection of one caller. Requests are answered as they finish, and the caller's sessions are closed with the connection."""

    def __init__(self, host: EnvironmentHost, socket: WebSocket) -> None:
        """Create the connection for the caller's socket."""
        self._host, self._socket = host, socket
        self._sessions = OpenSessions(host.run)
        self._tasks: set[asyncio.Task[None]] = set()
        self._held_bytes = 0

    async def talk(self) -> None:
        """Answer requests until the connection is closed."""
        limits = self._host.limits
        self._host.connections.add(self._sessions)
        try:
            while len(self._tasks) < limits.unanswered:
                while self._held_bytes > limits.held_bytes:
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                text = await self._socket.receive_text()
                self._held_bytes += len(text)
                task = asyncio.create_task(self._one(text))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await self._socket.close(1008, f"{limits.unanswered:,} requests are still unanswered")
        finally:
            self._host.connections.discard(self._sessions)
            open_sessions, self._sessions.open = list(self._sessions.open.values()), {}
            for task in self._tasks:
                task.cancel()
            for session in open_sessions:
                self._host.close_later(session)

    async def _one(self, text: str) -> None:
        self._host.in_progress += 1
        answer = ""
        try:
            answer = await self._answer(text)
            self._held_bytes += len(answer)
            with suppress(WebSocketDisconnect, RuntimeError):  # the caller has disconnected
                await self._socket.send_text(answer)
        finally:
            self._held_bytes -= len(text) + len(answer)
            self._host.in_progress -= 1

    async def _answer(self, text: str) -> str:
        number: int | None = None
        try:
            request = _read(text)
            number = request.pop("id")
            if self._host.ended:
                raise shutting_down()
            value = await self._host.answer(str(request.pop("call", None)), request, self._sessions)
            return to_text({"id": number, "value": value}, LARGEST)
        except RequestError as error:
            return _error_text(number, error)
        except Raised as raised:
            return to_text({"id": number, "error": raised.form}, LARGEST)
        except EpisodeError as error:  # the response cannot be represented in JSON or is too long
            return to_text({"id": number, "error": error_form(error)}, LARGEST)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the connection has ended
                raise
            return _error_text(number, RequestError(404, "The session was closed in the meantime."))
        except Exception as error:
            log_failure("A request about an environment failed.", error)
            return _error_text(number, RequestError(500, "The service failed; see its log."))


def _read(text: str) -> dict[str, Any]:
    try:
        request = from_text(text)
    except ValueError as error:
        raise wrong(f"The message is not JSON: {str(error)[:200]}.") from None
    number = request.get("id") if isinstance(request, dict) else None
    if not isinstance(number, int) or isinstance(number, bool):
        raise wrong("A request must be a JSON object whose `id` is an integer.", "id")
    return dict(request)


def _error_text(number: int | None, error: RequestError) -> str:
    return to_text({"id": number, "refused": [error.status, error.message]}, LARGEST)


# -------- The server

CLOSING_SECONDS = 5.0
"""Maximum time in seconds for closing sessions after the server has stopped."""
POLL_SECONDS = 0.05
"""The number of seconds between two checks while the server is draining."""


@dataclass(frozen=True, slots=True)
class EnvironmentServer:
    """An environment server that accepts connections."""

    address: str
    host: EnvironmentHost
    http: HttpServer

    def drain(self, seconds: float) -> bool:
        """Reject new sessions, and return whether all accepted calls were answered within `seconds`.

        Open sessions may continue for at most half of the time.
        """
        until = time.monotonic() + seconds
        self.host.draining = True
        _wait_until(lambda: not self.host.sessions, until - seconds / 2)
        self.host.ended = True
        answered = _wait_until(lambda: not self.host.in_progress, until)
        return self.http.drain(max(0.0, until - time.monotonic())) and answered


def _wait_until(holds: Callable[[], bool], until: float) -> bool:
    while not holds():
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_SECONDS)
    return True


@contextmanager
def serve_environments(
    environments: Mapping[str, Environment],
    binding: Binding,
    limits: SessionLimits | None = None,
    processes: int = 0,
) -> Iterator[EnvironmentServer]:
    """Serve environments by name while the block runs.

    The episodes run in `processes` processes, or in this process if `processes` is 0. Raises ConfigError if the port is
    in use, and DataError for data that cannot be read.
    """
    limits = limits or SessionLimits()
    with ExitStack() as closing:
        registry = EnvironmentRegistry(environments, processes, limits.call_seconds)
        loop = closing.enter_context(LoopThread())
        host = EnvironmentHost(registry, loop, limits, guarded=binding.token is not None)
        closing.callback(registry.close)
        closing.callback(host.close, CLOSING_SECONDS)

        async def health(_: Call) -> JsonAnswer:
            if host.draining:
                raise shutting_down()
            return JsonAnswer({"status": "healthy", "sessions": len(host.sessions), "most": limits.sessions})

        application = SocketApplication(
            binding,
            [route("GET", "/health", health)],
            PATH,
            lambda socket: Connection(host, socket).talk(),
            limits.connections,
            f"{limits.connections:,} connections are open, which is the limit.",
        )
        with socket_server(binding, application, LARGEST) as http:
            yield EnvironmentServer(http.url.partition("://")[2], host, http)
