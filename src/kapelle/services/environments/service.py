"""The environment server: worlds offered to runs on this and other machines, over the protocol of `wire/worlds.py`.

    with serve_environments({"sums": Arithmetic()}, Binding(), SessionLimits()) as server:
        print(server.address)

`docs/environment_server.md` says what each request does.
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
from kapelle.runtime.wire import LARGEST
from kapelle.runtime.wire.worlds import PATH, from_text, to_text
from kapelle.services.binding import Binding, log_failure
from kapelle.services.environments.host import EnvironmentHost, Raised, SessionLimits, Shelf, leaving
from kapelle.services.environments.requests import REQUESTS
from kapelle.services.http import CONNECTIONS, Call, HttpServer, JsonAnswer, route
from kapelle.services.refusals import Refusal, read_body, wrong
from kapelle.services.sockets import SocketApplication, socket_server

# -------- One connection: many requests under way at once, answered as they are done

UNANSWERED = 8192
"""Requests of one connection that wait for their answers; a caller with more is cut off."""
HELD_BYTES = 16 * LARGEST
"""Of requests under way and their answers; a connection with more is read on once some are answered."""


class Connection:
    """The requests of one caller, and the sessions that it has opened, which end with it."""

    def __init__(self, host: EnvironmentHost, socket: WebSocket) -> None:
        """Take the caller's socket."""
        self._host, self._socket = host, socket
        self._sessions = OpenSessions(host.beside)
        self._tasks: set[asyncio.Task[None]] = set()
        self._held = 0

    async def talk(self) -> None:
        """Answer requests until the connection ends."""
        self._host.connections.add(self._sessions)
        try:
            while len(self._tasks) < UNANSWERED:
                while self._held > HELD_BYTES:
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                text = await self._socket.receive_text()
                self._held += len(text)
                task = asyncio.create_task(self._one(text))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await self._socket.close(1008, f"{UNANSWERED:,} requests are not answered yet")
        finally:
            self._host.connections.discard(self._sessions)
            left, self._sessions.open = list(self._sessions.open.values()), {}
            for task in self._tasks:
                task.cancel()
            for session in left:
                self._host.let_go(session)

    async def _one(self, text: str) -> None:
        self._host.under_way += 1
        answer = ""
        try:
            answer = await self._text_of_answer(text)
            self._held += len(answer)
            with suppress(WebSocketDisconnect, RuntimeError):  # the caller is gone
                await self._socket.send_text(answer)
        finally:
            self._held -= len(text) + len(answer)
            self._host.under_way -= 1

    async def _text_of_answer(self, text: str) -> str:
        number: int | None = None
        try:
            request = _read(text)
            number = request.pop("id")
            return to_text({"id": number, "value": await self._answer(request)}, LARGEST)
        except Refusal as refusal:
            return _refused(number, refusal)
        except Raised as raised:
            return to_text({"id": number, "error": raised.form}, LARGEST)
        except EpisodeError as error:  # an answer that JSON cannot hold, or one that is too long
            return to_text({"id": number, "error": error_form(error)}, LARGEST)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the connection has ended
                raise
            return _refused(number, Refusal(404, "The session was closed meanwhile."))
        except Exception as error:
            log_failure("A request about an environment failed.", error)
            return _refused(number, Refusal(500, "The service failed; its log says why."))

    async def _answer(self, request: dict[str, Any]) -> Any:
        if self._host.ended:
            raise leaving()
        form = REQUESTS.get(str(request.pop("call", None)))
        if form is None:
            raise wrong(f"`call` is one of {', '.join(REQUESTS)}.", "call")
        return await read_body(form, request).answer(self._host, self._sessions)


def _read(text: str) -> dict[str, Any]:
    try:
        request = from_text(text)
    except ValueError as error:
        raise wrong(f"The message is no JSON: {str(error)[:200]}.") from None
    number = request.get("id") if isinstance(request, dict) else None
    if not isinstance(number, int) or isinstance(number, bool):
        raise wrong("A request is a JSON object with an `id`, a whole number that its answer repeats.", "id")
    return dict(request)


def _refused(number: int | None, refusal: Refusal) -> str:
    return to_text({"id": number, "refused": [refusal.status, refusal.message]}, LARGEST)


# -------- The server as a whole: what it holds, a thread of worlds, and the port

CLOSING_SECONDS = 5.0
"""For worlds to close after the server has ended."""
LOOK_SECONDS = 0.05
"""Between two looks at whether everything has ended."""


@dataclass(frozen=True, slots=True)
class EnvironmentServer:
    """An environment server that listens."""

    address: str
    host: EnvironmentHost
    http: HttpServer

    def drain(self, seconds: float) -> bool:
        """Refuse new sessions, let open ones play for half the time, and return whether all accepted calls were answered."""
        until = time.monotonic() + seconds
        self.host.leaving = True
        _wait_until(lambda: not self.host.sessions, until - seconds / 2)
        self.host.ended = True
        answered = _wait_until(lambda: not self.host.under_way, until)
        return self.http.drain(max(0.0, until - time.monotonic())) and answered


def _wait_until(over: Callable[[], bool], until: float) -> bool:
    while not over():
        if time.monotonic() >= until:
            return False
        time.sleep(LOOK_SECONDS)
    return True


@contextmanager
def serve_environments(
    environments: Mapping[str, Environment],
    binding: Binding,
    limits: SessionLimits | None = None,
    processes: int = 0,
) -> Iterator[EnvironmentServer]:
    """Serve environments by name while the block runs; their worlds live in `processes` processes, 0 for this one.

    Raises ConfigError if the port is taken, DataError for data that cannot be read.
    """
    limits = limits or SessionLimits()
    with ExitStack() as closing:
        shelf = Shelf(environments, processes, limits.call_seconds)
        worlds = closing.enter_context(LoopThread())
        host = EnvironmentHost(shelf, worlds, limits, guarded=binding.token is not None)
        closing.callback(shelf.close)
        closing.callback(host.close, CLOSING_SECONDS)

        async def health(_: Call) -> JsonAnswer:
            if host.leaving:
                raise leaving()
            return JsonAnswer({"status": "healthy", "sessions": len(host.sessions), "most": limits.sessions})

        application = SocketApplication(
            binding,
            [route("GET", "/health", health)],
            PATH,
            lambda socket: Connection(host, socket).talk(),
            CONNECTIONS,
            f"{CONNECTIONS:,} connections are open, the most there may be.",
        )
        with socket_server(binding, application, LARGEST) as http:
            yield EnvironmentServer(http.url.partition("://")[2], host, http)
