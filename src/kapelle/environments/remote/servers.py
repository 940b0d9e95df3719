"""Environment servers as a run sees them: connections and their ends, several servers behind one recipe, and the worlds on them.

Each world goes where the fewest are, and to another server when one dies.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from kapelle.environment import Outcome, RemoteWorld, Retriable, Scorable, WorkerLost, report_change
from kapelle.errors import ConfigError, EngineError, EpisodeError
from kapelle.runtime.credentials import authorization
from kapelle.runtime.deadlines import UNBREAKABLE, Patience, within
from kapelle.runtime.event_loop import LoopThread
from kapelle.runtime.foreign_code import environment_error
from kapelle.runtime.http import error_message
from kapelle.runtime.wire import LARGEST
from kapelle.runtime.wire.worlds import PATH, Description, description_from, from_text, to_text

# -------- One connection to an environment server: requests go out, answers come in, and its end is noticed
#
# All connections of a process live on a thread of their own, so that answers do not wait for anybody's event loop; any thread
# may send requests.


class Busy(Exception):
    """The server is full now, is about to shut down, or gives no answer."""


@lru_cache(maxsize=1)
def _thread(process: int) -> LoopThread:
    return LoopThread().__enter__()  # ends with the process


PING_SECONDS = 20
"""After which a silent connection is pinged, and in which the server has to answer."""
CONNECT_SECONDS = 10.0
"""In which a connection has to be there."""


class Line:
    """Requests about any number of sessions; those that were opened here end with it."""

    def __init__(self, link: EnvironmentServerLink) -> None:
        """Begin to connect; whether somebody answers is known by the first answer."""
        self._link = link
        self._guard = threading.Lock()
        self._numbers = count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._socket: ClientConnection | None = None
        self._connected = asyncio.Event()
        self.lost: str | None = None
        """How it ended, once it has."""
        self._thread = _thread(os.getpid())
        self._talking = self._thread.begin(self._talk)

    def send(self, request: Mapping[str, Any]) -> Future[Any]:
        """Send a request; its answer, or what the environment raised, WorkerLost, Busy or RefusedRequest."""
        number = next(self._numbers)
        text = to_text({"id": number, **request}, LARGEST)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # who waits may go away; the answer comes none the less
        with self._guard:
            if self.lost is not None:
                raise WorkerLost(self.lost, blamed=False)
            self._waiting[number] = future
        self._thread.begin(lambda: self._write(text))
        return future

    def close(self) -> None:
        """End the connection and all sessions that were opened here."""
        self._talking.cancel()

    async def _write(self, text: str) -> None:
        await self._connected.wait()
        if self._socket is not None:
            with suppress(WebSocketException):  # its end is noticed where answers are read
                await self._socket.send(text)

    async def _talk(self) -> None:
        fault: Exception = WorkerLost("it was closed", blamed=False)
        try:
            async with self._link.connection() as self._socket:
                self._connected.set()
                async for text in self._socket:
                    self._take(text)
            fault = self._gone("it ended the connection")
        except InvalidStatus as error:
            status = error.response.status_code
            message = error_message(bytes(error.response.body or b"")).removeprefix(": ")
            how = message or f"it answers with status {status}"
            fault = self._gone(how) if status in PASSING else refusal_of(status, how)
        except (OSError, KeyError, TypeError, ValueError, WebSocketException) as error:
            fault = self._gone(str(error) or type(error).__name__)
        finally:
            with self._guard:
                self.lost = str(fault)
                left, self._waiting = list(self._waiting.values()), {}
            self._connected.set()
            for future in left:
                future.set_exception(fault)

    def _gone(self, how: str) -> WorkerLost:
        return WorkerLost(f"the environment server at {self._link.address} is gone ({how})", blamed=False)

    def _take(self, text: str | bytes) -> None:
        answer = from_text(text)
        with self._guard:
            future = self._waiting.pop(answer["id"], None)
        if future is None:
            return
        if "error" in answer:
            future.set_exception(environment_error(*answer["error"]))
        elif "refused" in answer:
            future.set_exception(refusal_of(*answer["refused"]))
        else:
            future.set_result(answer["value"])


PASSING = (429, 503)
"""Statuses of a server without room, or one that ends."""


class RefusedRequest(EpisodeError):
    """A request that the server refuses; `status` says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"The environment server refused a call ({status}): {message}")
        self.status, self.reason = status, message


def refusal_of(status: int, message: str) -> Exception:
    """Return what a status and its message stand for; see `docs/environment_server.md`."""
    if status in PASSING:
        return Busy(message)
    return WorkerLost(message, blamed=True) if status == 410 else RefusedRequest(status, message)


FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before an unavailable server is asked again."""


class EnvironmentServerLink:
    """One server; any thread may use it."""

    def __init__(self, address: str, certificate: str | None, token: str | None, *, tls: bool) -> None:
        """Connect on first use. ConfigError for an unreadable certificate."""
        self.address = address
        self.sessions = 0
        """Worlds that this process plays there."""
        self.asked_last = ""
        """Why it did not answer last; empty where it did."""
        self._resting = (0.0, 0.0)
        """Until when it is left alone, and for how long it was."""
        self._owner = os.getpid()
        url = f"http{'s' if tls else ''}://{address}"
        self._headers = authorization(token, "`environment.token_env`", url) if token else {}
        self._tls = _trusted(certificate) if tls else None
        self._guard = threading.Lock()
        self._line: Line | None = None

    def connection(self) -> connect:
        """Return a connection, which begins where it is awaited."""
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
        """Send a request about an environment and wait; raises Busy if the server does not answer, or what the environment raised."""
        try:
            answer = self.line().send(request).result(seconds)
        except RefusedRequest as refused:
            if refused.status == 416:
                raise IndexError(refused.reason) from None
            raise self.stops(refused) from None
        except (Busy, TimeoutError, WorkerLost) as fault:
            self.rest(str(fault) or "no answer in time")
            raise Busy(str(fault)) from None
        self.answered()
        return answer

    def stops(self, refused: RefusedRequest) -> ConfigError:
        """Return the error that stops a run whose request is refused."""
        return ConfigError(f"The environment server at {self.address} refuses: {refused.reason}")

    def line(self) -> Line:
        """Return the open connection; a new one where the last has ended."""
        with self._guard:
            if self._line is None or self._line.lost is not None:
                self._line = Line(self)
            return self._line

    @property
    def ready(self) -> bool:
        """Whether it may be asked now: it answered last, or has been left alone for long enough."""
        return time.monotonic() >= self._resting[0]

    def rest(self, why: str) -> None:
        """Note a missing answer, and wait before the next request, longer each time."""
        self.asked_last = why
        if self.ready:  # many may hear of one failure
            pause = min(max(FIRST_PAUSE, 2 * self._resting[1]), LONGEST_PAUSE)
            self._resting = (time.monotonic() + pause, pause)

    def answered(self) -> None:
        """Note that it answers."""
        self._resting, self.asked_last = (0.0, 0.0), ""

    def close(self) -> None:
        """End the connection, and with it the sessions there."""
        if self._line is not None and os.getpid() == self._owner:
            self._line.close()


def _trusted(certificate: str | None) -> ssl.SSLContext:
    if certificate is None:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cafile=Path(certificate).expanduser())
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"environment.certificate: {certificate} cannot be read: {error.strerror or error}. Name the PEM file of the "
            "certificate that the servers show, or of the authority that signed it."
        ) from None


# -------- Several servers behind one recipe

SHORTEST_PAUSE = 0.05
"""Seconds between two looks for a server that may be asked."""


class Servers:
    """The servers of one `environment` section; any thread may use them."""

    def __init__(self, servers: Sequence[EnvironmentServerLink], name: str, retry_seconds: float) -> None:
        """Take the servers, the name of the environment there, and how long all of them may be unavailable."""
        self._servers, self._name, self._retry_seconds = list(servers), name, retry_seconds
        self._guard = threading.Lock()
        self._described: Description | None = None
        self._versions: dict[str, tuple[int, str]] = {}
        """Address → the version and the content that it played last."""

    def describe(self) -> Description:
        """Return what the environment is, as the servers say; ConfigError where they hold different ones."""
        with self._guard:
            if self._described is None:
                request = {"call": "describe", "environment": self._name}
                first = description_from(self.call(request, 60.0))
                for server in self._servers:
                    try:
                        found = description_from(server.call(request, 10.0))
                    except Busy:  # it may come later
                        continue
                    self._versions[server.address] = (found.version, found.content)
                    if found.content != first.content:
                        raise ConfigError(
                            f"The environment servers do not hold the same '{first.name}': the content is {first.content} at "
                            f"one of them and {found.content} at {server.address}. Start them with the same environment and "
                            "settings."
                        )
                self._described = first
            return self._described

    def call(self, request: Mapping[str, Any], seconds: float) -> Any:
        """Send a request to any server and wait for the answer; raises what `EnvironmentServerLink.call` raises, and EngineError if no server is reachable."""
        until = time.monotonic() + self._retry_seconds
        while True:
            for server in self._order():
                try:
                    return server.call(request, seconds)
                except Busy:
                    continue
            if time.monotonic() > until:
                raise self._nobody()
            time.sleep(SHORTEST_PAUSE)

    async def open_world(self, request: Mapping[str, Any], name: str, patience: Patience) -> ServerWorld:
        """Open a world on a server with room; raises what the environment raised, and EngineError if no server is reachable."""
        until = time.monotonic() + self._retry_seconds
        while True:
            for server in self._order():
                try:
                    world = ServerWorld(server, name, patience)
                    began = await world.reset(request)
                except WorkerLost as gone:
                    if gone.blamed:
                        raise
                    server.rest(str(gone))
                    continue
                except RefusedRequest as refused:
                    raise server.stops(refused) from None
                server.answered()
                self._note(server, began["version"])
                return world
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
    """Return the connections of a process (`os.getpid()`) to these servers: the same ones whenever they are asked for."""
    servers = [
        EnvironmentServerLink(address, certificate, token, tls=secure)
        for address, secure in zip(addresses, tls, strict=True)
    ]
    return Servers(servers, name, retry_seconds)


# -------- Worlds on a server, as they are played from here


_sessions = count(1)


class ServerWorld(RemoteWorld):
    """A world on a server, which bounds each call of the environment; here that bound holds with some time to spare."""

    def __init__(self, server: EnvironmentServerLink, name: str, patience: Patience) -> None:
        """Take the server; `reset` opens the world. WorkerLost where the connection has just ended."""
        super().__init__(name, patience)
        self._server, self._line, self._session = server, server.line(), next(_sessions)
        server.sessions += 1

    @property
    def lost(self) -> WorkerLost | None:
        """How the world was lost with its server; None while the server lives."""
        return None if self._line.lost is None else WorkerLost(self._line.lost, blamed=False)

    async def call(self, method: str, request: Mapping[str, Any]) -> Any:
        """See `RemoteWorld`."""
        if method == "start":  # it may wait there for a free place; the server bounds what computes
            return await self._answer(request)
        slowest = max(self._patience.grader, self._patience.environment)
        seconds = (slowest if method == "score" else self._patience.environment) + UNBREAKABLE
        what = f"`{method}` of environment '{self._name}'"
        return await within(what, "environment", seconds, self._answer(request))

    def _request(self, request: Mapping[str, Any]) -> Future[Any]:
        return self._line.send({**request, "session": self._session})

    async def _answer(self, request: Mapping[str, Any]) -> Any:
        try:
            return await asyncio.wrap_future(self._request(request))
        except Busy as busy:
            raise WorkerLost(str(busy), blamed=False) from None
        except RefusedRequest as refused:
            raise WorkerLost(str(refused), blamed=False) if refused.status == 404 else refused from None

    def outcome_now(self, seconds: float) -> Outcome:
        """Return the outcome and wait for it here, for so many seconds at most."""
        return Outcome(**self._request({"call": "outcome"}).result(seconds))

    def release(self) -> None:
        """See `RemoteWorld`."""
        self._server.sessions -= 1


class InnerWorld(Retriable):
    """A world on a server inside another world that is here: what has to be answered at once waits for the server."""

    def __init__(self, world: ServerWorld, patience: Patience) -> None:
        self._world = world
        self._seconds = patience.environment + UNBREAKABLE

    def observe(self, agent: str) -> str:
        """See `environment.World`."""
        return self._world.observe(agent)

    def movers(self) -> tuple[str, ...]:
        """See `environment.World`."""
        return self._world.movers()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """See `environment.World`."""
        return await self._world.step(actions, final)

    def allow_answers(self, most: int) -> None:
        """See `environment.Retriable`."""
        self._world.allow_answers(most)

    def outcome(self) -> Outcome:
        """See `environment.World`."""
        return self._world.outcome_now(self._seconds)

    async def close(self) -> None:
        """See `environment.World`."""
        await self._world.close()


class ScorableInnerWorld(InnerWorld, Scorable):
    """One that can score a text before the episode is over."""

    async def score(self, agent: str, text: str) -> float:
        """See `environment.Scorable`."""
        return await self._world.score(agent, text)
