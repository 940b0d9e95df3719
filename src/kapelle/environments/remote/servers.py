"""The client side of environment servers: connections, several servers for one recipe, and episodes on the servers.

Each episode is opened on the server with the fewest episodes, or on another server if that server fails.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from kapelle.environment import Outcome, RemoteState, Retriable, Scorable, WorkerLost, report_change
from kapelle.errors import ConfigError, EngineError, EpisodeError
from kapelle.runtime.credentials import authorization
from kapelle.runtime.deadlines import UNBREAKABLE, Patience, within
from kapelle.runtime.event_loop import LoopThread
from kapelle.runtime.foreign_code import environment_error
from kapelle.runtime.http import error_message
from kapelle.runtime.wire.worlds import LARGEST, PATH, Description, description_from, from_text, to_text

# -------- One connection to an environment server
#
# All connections of a process share a thread with its own event loop. Any thread may send requests.


class Busy(Exception):
    """Raised if a server is full, is shutting down, or does not respond."""


PASSING = (429, 503)
"""HTTP status codes of a server that is full or is shutting down."""


class RequestRejected(EpisodeError):
    """Raised if a server rejects a request with the given `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"The environment server rejected a request (status {status}): {message}")
        self.status, self.reason = status, message


def error_of_response(status: int, message: str) -> Exception:
    """Return the exception for an error status; the statuses are described in `docs/environment_server.md`."""
    if status in PASSING:
        return Busy(message)
    return WorkerLost(message, blamed=True) if status == 410 else RequestRejected(status, message)


@lru_cache(maxsize=1)
def _thread(process: int) -> LoopThread:
    return LoopThread().__enter__()  # the thread ends with the process


PING_SECONDS = 20
"""Time in seconds without a message before a ping is sent, and maximum time in seconds to wait for the response to a ping."""
CONNECT_SECONDS = 10.0
"""Maximum time in seconds for opening a connection."""


class ServerConnection:
    """A connection to an environment server; the episodes on a connection end when the connection is closed."""

    def __init__(self, link: EnvironmentServerLink) -> None:
        """Start to connect; if the connection fails, the first request raises the error."""
        self._link = link
        self._guard = threading.Lock()
        self._numbers = count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._socket: ClientConnection | None = None
        self._connected = asyncio.Event()
        self.lost: str | None = None
        """The reason why the connection was closed, or None while it is open."""
        self._thread = _thread(os.getpid())
        self._reading = self._thread.begin(self._read)

    def send(self, request: Mapping[str, Any]) -> Future[Any]:
        """Send a request and return a future for its response.

        The future raises the error of the environment, WorkerLost, Busy or RequestRejected.
        """
        number = next(self._numbers)
        text = to_text({"id": number, **request}, LARGEST)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # the response may arrive after the caller is cancelled
        with self._guard:
            if self.lost is not None:
                raise WorkerLost(self.lost, blamed=False)
            self._waiting[number] = future
        self._thread.begin(lambda: self._write(text))
        return future

    def close(self) -> None:
        """Close the connection, which ends its episodes."""
        self._reading.cancel()

    async def _write(self, text: str) -> None:
        await self._connected.wait()
        if self._socket is not None:
            with suppress(WebSocketException):  # `_read` notices the end of the connection
                await self._socket.send(text)

    async def _read(self) -> None:
        fault: Exception = WorkerLost("the connection was closed", blamed=False)
        try:
            async with self._link.connection() as self._socket:
                self._connected.set()
                async for text in self._socket:
                    self._receive(text)
            fault = self._gone("the server closed the connection")
        except InvalidStatus as error:
            status = error.response.status_code
            message = error_message(bytes(error.response.body or b"")).removeprefix(": ")
            message = message or f"the server responded with status {status}"
            fault = self._gone(message) if status in PASSING else error_of_response(status, message)
        except (OSError, KeyError, TypeError, ValueError, WebSocketException) as error:
            fault = self._gone(str(error) or type(error).__name__)
        finally:
            with self._guard:
                self.lost = str(fault)
                waiting, self._waiting = list(self._waiting.values()), {}
            self._connected.set()
            for future in waiting:
                future.set_exception(fault)

    def _gone(self, how: str) -> WorkerLost:
        return WorkerLost(
            f"the environment server at {self._link.address} has disconnected ({how})", blamed=False
        )

    def _receive(self, text: str | bytes) -> None:
        answer = from_text(text)
        with self._guard:
            future = self._waiting.pop(answer["id"], None)
        if future is None:
            return
        if "error" in answer:
            future.set_exception(environment_error(*answer["error"]))
        elif "refused" in answer:
            future.set_exception(error_of_response(*answer["refused"]))
        else:
            future.set_result(answer["value"])


# -------- One server

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Minimum and maximum time in seconds until the next call to an unavailable server. The time doubles with each failure."""


class EnvironmentServerLink:
    """The client of one environment server, which can be used from any thread."""

    def __init__(self, address: str, certificate: str | None, token: str | None, *, tls: bool) -> None:
        """Prepare to connect on first use; raise ConfigError if the certificate cannot be read."""
        self.address = address
        self.sessions = 0
        """The number of episodes that this process has open on the server."""
        self.failure = ""
        """The reason why the last request received no response; empty after a response."""
        self._pause, self._available_at = 0.0, 0.0
        self._owner = os.getpid()
        url = f"http{'s' if tls else ''}://{address}"
        self._headers = authorization(token, "`environment.token_env`", url) if token else {}
        self._tls = _tls_context(certificate) if tls else None
        self._guard = threading.Lock()
        self._connection: ServerConnection | None = None

    def connection(self) -> connect:
        """Return a new connection, which is opened as an asynchronous context manager."""
        return connect(
            f"ws{'' if self._tls is None else 's'}://{self.address}{PATH}",
            ssl=self._tls,
            additional_headers=self._headers,
            compression=None,
            open_timeout=CONNECT_SECONDS,
            ping_interval=PING_SECONDS,
            ping_timeout=PING_SECONDS,
            max_size=LARGEST,
            proxy=None,
        )

    def call(self, request: Mapping[str, Any], seconds: float) -> Any:
        """Send a request and return the response.

        Raises Busy if the server does not respond within `seconds`, and the error of the environment if the environment raises
        one.
        """
        try:
            answer = self.current().send(request).result(seconds)
        except RequestRejected as rejected:
            if rejected.status == 416:
                raise IndexError(rejected.reason) from None
            raise self.stops(rejected) from None
        except (Busy, TimeoutError, WorkerLost) as fault:
            self.failed(str(fault) or "no response in time")
            raise Busy(str(fault)) from None
        self.answered()
        return answer

    def stops(self, rejected: RequestRejected) -> ConfigError:
        """Return the error that stops a run whose request was rejected."""
        return ConfigError(f"The environment server at {self.address} rejected the run: {rejected.reason}")

    def current(self) -> ServerConnection:
        """Return the open connection, or a new connection if the last one was closed."""
        with self._guard:
            if self._connection is None or self._connection.lost is not None:
                self._connection = ServerConnection(self)
            return self._connection

    @property
    def available(self) -> bool:
        """Whether the waiting time after the last failure of the server has passed."""
        return time.monotonic() >= self._available_at

    def failed(self, why: str) -> None:
        """Record that a response is missing and start a waiting time, which increases with each failure."""
        self.failure = why
        if self.available:  # one failure may reach many callers
            self._pause = min(max(FIRST_PAUSE, 2 * self._pause), LONGEST_PAUSE)
            self._available_at = time.monotonic() + self._pause

    def answered(self) -> None:
        """Record that the server has responded."""
        self._pause, self._available_at, self.failure = 0.0, 0.0, ""

    def close(self) -> None:
        """Close the connection to the server, which ends its episodes."""
        if self._connection is not None and os.getpid() == self._owner:
            self._connection.close()


def _tls_context(certificate: str | None) -> ssl.SSLContext:
    if certificate is None:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cafile=Path(certificate).expanduser())
    except OSError as error:  # includes ssl.SSLError
        raise ConfigError(
            f"environment.certificate: {certificate} cannot be read: {error.strerror or error}. Give the PEM file of the servers' "
            "certificate, or of the authority that signed it."
        ) from None


# -------- Several servers for one recipe

POLL_SECONDS = 0.05
"""Time in seconds between two attempts to find an available server."""


class Servers:
    """The servers of one `environment` section, which can be used from any thread."""

    def __init__(self, servers: Sequence[EnvironmentServerLink], name: str, retry_seconds: float) -> None:
        """Set the servers, the name of the environment on the servers, and the time in seconds for which all of them may be unavailable."""
        self._servers, self._name, self._retry_seconds = list(servers), name, retry_seconds
        self._guard = threading.Lock()
        self._description: Description | None = None
        self._versions: dict[str, int] = {}
        """Mapping from the address of each server to the last known version of the environment."""

    def describe(self) -> Description:
        """Return the description of the environment; raise ConfigError if the servers have different environments."""
        with self._guard:
            if self._description is None:
                request = {"call": "describe", "environment": self._name}
                first = description_from(self.call(request, 60.0))
                for server in self._servers:
                    try:
                        found = description_from(server.call(request, 10.0))
                    except Busy:  # the server may become available later
                        continue
                    self._versions[server.address] = found.version
                    if found.content != first.content:
                        raise ConfigError(
                            f"The environment servers do not serve the same '{first.name}': one server has the content {first.content}, "
                            f"but {server.address} has {found.content}. Start all servers with the same environment and settings."
                        )
                self._description = first
            return self._description

    def _attempts(self) -> Iterator[EnvironmentServerLink | None]:
        """Yield the available servers, starting with the server that has the fewest episodes, and None whenever the caller should wait.

        Raises EngineError after `retry_seconds`.
        """
        until = time.monotonic() + self._retry_seconds
        while True:
            available = [server for server in self._servers if server.available]
            yield from sorted(available, key=lambda server: server.sessions)
            if time.monotonic() > until:
                why = "; ".join(f"{each.address}: {each.failure or 'no response'}" for each in self._servers)
                raise EngineError(
                    f"No environment server has responded within {self._retry_seconds:g} s ({why}). Start a server with "
                    "`kapelle serve environments`, or check `environment.address`."
                )
            yield None

    def call(self, request: Mapping[str, Any], seconds: float) -> Any:
        """Send a request to any available server and return the response.

        Raises the same errors as `EnvironmentServerLink.call` except Busy, and EngineError if no server is reachable.
        """
        for server in self._attempts():
            if server is None:
                time.sleep(POLL_SECONDS)
                continue
            with suppress(Busy):
                return server.call(request, seconds)
        raise AssertionError("`_attempts` ends with an error")

    async def open_state(self, request: Mapping[str, Any], name: str, patience: Patience) -> ServerState:
        """Open an episode on a server that is not full and return its state.

        Raises the error of the environment if the environment raises one, and EngineError if no server is reachable.
        """
        for server in self._attempts():
            if server is None:
                await asyncio.sleep(POLL_SECONDS)
                continue
            try:
                state = ServerState(server, name, patience)
                began = await state.reset(request)
            except WorkerLost as lost:
                if lost.blamed:
                    raise
                server.failed(str(lost))
                continue
            except RequestRejected as rejected:
                raise server.stops(rejected) from None
            server.answered()
            self._note_version(server, began["version"])
            return state
        raise AssertionError("`_attempts` ends with an error")

    def _note_version(self, server: EnvironmentServerLink, version: int) -> None:
        """Report once that a server has replaced its environment with a new version."""
        before = self._versions.setdefault(server.address, version)
        if before == version:
            return
        self._versions[server.address] = version
        report_change(
            f"environment '{self._name or self.describe().name}' at {server.address} has changed from version {before} to "
            f"version {version}; new episodes use the new version"
        )
        with self._guard:
            self._description = None  # fetched again when it is next needed

    def close(self) -> None:
        """Close the connections to all servers."""
        for server in self._servers:
            server.close()


@lru_cache(maxsize=64)
def servers_at(
    process: int,
    addresses: tuple[str, ...],
    name: str,
    certificate: str | None,
    token: str | None,
    tls: tuple[bool, ...],
    retry_seconds: float,
) -> Servers:
    """Return the connections of this process (`os.getpid()`) to servers; the same arguments return the same object."""
    links = [
        EnvironmentServerLink(address, certificate, token, tls=secure)
        for address, secure in zip(addresses, tls, strict=True)
    ]
    return Servers(links, name, retry_seconds)


# -------- Episodes on a server


_sessions = count(1)


class ServerState(RemoteState):
    """The state of an episode on a server.

    The server limits the time of each call; the time limit in this class is slightly longer.
    """

    def __init__(self, server: EnvironmentServerLink, name: str, patience: Patience) -> None:
        """Store the server for the episode; `reset` opens the episode. Raises WorkerLost if the connection has just been closed."""
        super().__init__(name, patience)
        self._server, self._connection, self._session = server, server.current(), next(_sessions)
        server.sessions += 1

    @property
    def lost(self) -> WorkerLost | None:
        """The error with which the connection was closed, or None while the connection is open."""
        lost = self._connection.lost
        return None if lost is None else WorkerLost(lost, blamed=False)

    async def call(self, method: str, request: Mapping[str, Any]) -> Any:
        """Send a call to the server; see `RemoteState`."""
        if method == "start":  # the call may wait for a free place; the server limits the rest of its time
            return await self._answer(request)
        slowest = max(self._patience.grader, self._patience.environment)
        seconds = (slowest if method == "score" else self._patience.environment) + UNBREAKABLE
        what = f"`{method}` of environment '{self._name}'"
        return await within(what, "environment", seconds, self._answer(request))

    def _request(self, request: Mapping[str, Any]) -> Future[Any]:
        return self._connection.send({**request, "session": self._session})

    async def _answer(self, request: Mapping[str, Any]) -> Any:
        try:
            return await asyncio.wrap_future(self._request(request))
        except Busy as busy:
            raise WorkerLost(str(busy), blamed=False) from None
        except RequestRejected as rejected:
            raise WorkerLost(str(rejected), blamed=False) if rejected.status == 404 else rejected from None

    def outcome_now(self, seconds: float) -> Outcome:
        """Return the outcome of the episode; the call blocks for at most `seconds`."""
        return Outcome(**self._request({"call": "outcome"}).result(seconds))

    def release(self) -> None:
        """Record that the episode is closed; see `RemoteState`."""
        self._server.sessions -= 1


class InnerState(Retriable):
    """The state of an episode on a server that is part of a local environment; synchronous methods block."""

    def __init__(self, state: ServerState, patience: Patience) -> None:
        self._state = state
        self._seconds = patience.environment + UNBREAKABLE

    def observe(self, agent: str) -> str:
        """Return the observation of an agent; see `environment.EpisodeState`."""
        return self._state.observe(agent)

    def movers(self) -> tuple[str, ...]:
        """Return the agents that may move now; see `environment.EpisodeState`."""
        return self._state.movers()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Apply the actions of the agents; see `environment.EpisodeState`."""
        return await self._state.step(actions, final)

    def allow_answers(self, most: int) -> None:
        """Accept up to `most` messages as final answers; see `environment.Retriable`."""
        self._state.allow_answers(most)

    def outcome(self) -> Outcome:
        """Return the outcome of the episode; see `environment.EpisodeState`."""
        return self._state.outcome_now(self._seconds)

    async def close(self) -> None:
        """Close the episode; see `environment.EpisodeState`."""
        await self._state.close()


class ScorableInnerState(InnerState, Scorable):
    """An `InnerState` of an environment that can score a text before the episode ends."""

    async def score(self, agent: str, text: str) -> float:
        """Return the score of a text; see `environment.Scorable`."""
        return await self._state.score(agent, text)
