"""Environment servers as a run sees them: streams and their ends, several servers behind one recipe, and the worlds on them.

Each world goes where the fewest are, and to another server when one dies.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pydantic

from kapelle.environment import Outcome, RemoteWorld, Retriable, Scorable, WorkerLost, report_change
from kapelle.environments.remote import Remote
from kapelle.environments.remote.messages import from_map
from kapelle.errors import ConfigError, EngineError, EpisodeError
from kapelle.runtime.deadlines import UNBREAKABLE, Patience, within
from kapelle.runtime.foreign_code import environment_error
from kapelle.wire import LARGEST
from kapelle.wire import environment_v1_pb2 as pb
from kapelle.wire import environment_v1_pb2_grpc as pb_grpc

# -------- One open stream to an environment server: questions go out, answers come in, and its end is noticed
#
# A thread reads what arrives, so that answers do not wait for anybody's event loop; any thread may ask.


class Busy(Exception):
    """The server is full now, or is about to shut down."""


class Line:
    """Questions about any number of sessions; those that were opened here end with it."""

    def __init__(self, stub: Any, address: str, metadata: Sequence[tuple[str, str]]) -> None:
        """Open the stream; whether somebody answers is known by the first answer."""
        self._address = address
        self._guard = threading.Lock()
        self._numbers = count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._outgoing: SimpleQueue[pb.StreamQuestion | None] = SimpleQueue()
        self.lost: str | None = None
        """How it ended, once it has."""
        self._call = stub.Stream(iter(self._outgoing.get, None), metadata=metadata)
        threading.Thread(target=self._read, name="kapelle-remote", daemon=True).start()

    def ask(self, **question: Any) -> Future[Any]:
        """Send one question by its kind (`act=…`); the answer's message, or what the environment raised, or WorkerLost."""
        number = next(self._numbers)
        asked = pb.StreamQuestion(number=number, **question)
        if asked.ByteSize() > LARGEST:  # sent, it would end the whole stream
            raise EpisodeError(f"A message to the environment server has more than {LARGEST:,} bytes.")
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # who waits may go away; the answer comes none the less
        with self._guard:
            if self.lost is not None:
                raise WorkerLost(self.lost, blamed=False)
            self._waiting[number] = future
        self._outgoing.put(asked)
        return future

    def close(self) -> None:
        """End the stream and all sessions that were opened here."""
        self._call.cancel()

    def _read(self) -> None:
        how = "it ended the stream"
        try:
            for answer in self._call:
                with self._guard:
                    future = self._waiting.pop(answer.number, None)
                if future is None:
                    continue
                kind = answer.WhichOneof("answer")
                if kind == "error":
                    future.set_exception(raised(answer.error.code, answer.error.message))
                elif kind is None:
                    unread = "the environment server gave an answer that cannot be read"
                    future.set_exception(WorkerLost(unread, blamed=True))
                else:
                    future.set_result(getattr(answer, kind))
        except grpc.RpcError as error:
            how = f"{error.code().name}: {error.details()}"
        finally:
            how = f"the environment server at {self._address} is gone ({how})"
            with self._guard:
                self.lost = how
                left, self._waiting = list(self._waiting.values()), {}
            self._outgoing.put(None)
            for future in left:
                future.set_exception(WorkerLost(how, blamed=False))


def raised(code: str, message: str) -> BaseException:
    """Return what a status code and its message stand for; see the contract."""
    if code == "ABORTED":
        kind, _, said = message.partition(": ")
        return environment_error(kind, said)
    if code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
        return Busy(message)
    if code in ("DATA_LOSS", "NOT_FOUND"):
        return WorkerLost(message, blamed=code == "DATA_LOSS")
    return EpisodeError(f"The environment server refused a call ({code}): {message}")


MESSAGE_BYTES = 64 << 20
"""Greatest size of one message."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before an unavailable server is asked again."""
PING_SECONDS = 20
"""After which a silent connection is asked whether its other side is there."""


class EnvironmentServerLink:
    """One server; any thread may ask."""

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
        self._metadata = metadata_of(token)
        self._guard = threading.Lock()
        self._line: Line | None = None
        self._channel = channel_to(address, certificate, tls=tls)
        self._stub = pb_grpc.EnvironmentsStub(self._channel)

    def call(self, method: str, question: Any, seconds: float) -> Any:
        """Send a request outside a session and wait; raises Busy if the server does not answer, or what the environment raised."""
        try:
            answer = getattr(self._stub, method)(question, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            code, details = error.code().name, error.details()
            if code in (
                "UNAUTHENTICATED",
                "UNIMPLEMENTED",
                "FAILED_PRECONDITION",
                "INVALID_ARGUMENT",
                "NOT_FOUND",
            ):
                raise ConfigError(f"The environment server at {self.address} refuses: {details}") from None
            if code == "OUT_OF_RANGE":
                raise IndexError(details) from None
            if code in ("DEADLINE_EXCEEDED", "CANCELLED"):
                code = "UNAVAILABLE"
            fault = raised(code, details)
            if isinstance(fault, Busy):
                self.rest(details)
            raise fault from None
        self.answered()
        return answer

    def line(self) -> Line:
        """Return the open stream; a new one where the last has ended."""
        with self._guard:
            if self._line is None or self._line.lost is not None:
                self._line = Line(self._stub, self.address, self._metadata)
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
        if os.getpid() == self._owner:
            if self._line is not None:
                self._line.close()
            self._channel.close()


def metadata_of(token: str | None) -> tuple[tuple[str, str], ...]:
    """Return what calls carry so that a server knows the caller."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


def channel_to(address: str, certificate: str | None, *, tls: bool) -> grpc.Channel:
    """Return a channel, which connects on first use. ConfigError for an unreadable certificate."""
    options = [
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", PING_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", PING_SECONDS * 1000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.min_reconnect_backoff_ms", 1000),
    ]
    if not tls:
        return grpc.insecure_channel(address, options)
    try:
        read = None if certificate is None else Path(certificate).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"environment.certificate: {certificate} cannot be read: {error.strerror}. Name the PEM file of the "
            "certificate that the servers show, or of the authority that signed it."
        ) from None
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(read), options)


# -------- Several servers behind one recipe

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
                            f"The environment servers do not hold the same '{first.name}': the content is {first.content} at "
                            f"one of them and {said.content} at {server.address}. Start them with the same environment and "
                            "settings."
                        )
                self._described = first
            return self._described

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
                    line = server.line()
                    answer = line.ask(reset=question)
                    try:
                        began = await asyncio.wrap_future(answer)
                    except asyncio.CancelledError:
                        # A cancelled wait closes the session.
                        answer.add_done_callback(partial(_close_late, line))
                        raise
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


def _close_late(line: Line, late: Any) -> None:
    if late.exception() is None:
        try:
            line.ask(close=pb.CloseRequest(session=late.result().session))
        except WorkerLost:
            return


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


class ServerWorld(RemoteWorld):
    """A world on a server, which bounds each call of the environment; here that bound holds with some time to spare."""

    def __init__(
        self, server: EnvironmentServerLink, line: Line, began: pb.ResetReply, name: str, patience: Patience
    ) -> None:
        """Take the place of a session that has begun."""
        super().__init__(name, patience)
        self._server, self._line, self._session = server, line, began.session
        self.scorable = began.scorable
        self.update_view(view_of(began.view))
        self._allowed: int | None = None

    @property
    def lost(self) -> WorkerLost | None:
        """How the world was lost with its server; None while the server lives."""
        return None if self._line.lost is None else WorkerLost(self._line.lost, blamed=False)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """See `environment.World`."""
        moves = [pb.Move(agent=agent, text=text) for agent, text in actions.items()]
        asked = pb.ActRequest(session=self._session, moves=moves, final=final, answers_allowed=self._allowed)
        answer = await self._ask("step", act=asked)
        self._allowed = None
        self.update_view(view_of(answer.view))
        return {each.agent: each.amount for each in answer.rewards}

    async def score(self, agent: str, text: str) -> float:
        """See `environment.Scorable`."""
        asked = pb.ScoreRequest(session=self._session, agent=agent, text=text)
        return float((await self._ask("score", score=asked)).score)

    async def outcome(self) -> Outcome:
        """See `environment.World`."""
        return outcome_of(await self._ask("outcome", outcome=pb.OutcomeRequest(session=self._session)))

    def outcome_now(self, seconds: float) -> Outcome:
        """Return the outcome and wait for it here, for so many seconds at most."""
        asked = self._line.ask(outcome=pb.OutcomeRequest(session=self._session))
        return outcome_of(asked.result(seconds))

    def allow_answers(self, most: int) -> None:
        """See `environment.Retriable`; the server hears of it with the first step."""
        self._allowed = most

    async def close(self) -> None:
        """See `environment.World`; a world lost with its server is already closed."""
        try:
            if self.lost is None:
                await self._ask("close", close=pb.CloseRequest(session=self._session))
        except WorkerLost:
            pass
        finally:
            self._server.sessions -= 1

    async def _ask(self, method: str, **question: Any) -> Any:
        slowest = max(self._patience.grader, self._patience.environment)
        seconds = (slowest if method == "score" else self._patience.environment) + UNBREAKABLE
        return await within(
            f"`{method}` of environment '{self._name}'", "environment", seconds, self._answer(**question)
        )

    async def _answer(self, **question: Any) -> Any:
        try:
            return await asyncio.wrap_future(self._line.ask(**question))
        except Busy as busy:  # only a server that ends says this to one that plays
            raise WorkerLost(str(busy), blamed=False) from None


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


def view_of(view: pb.View) -> dict[str, Any]:
    """Return a view as `RemoteWorld.update_view` takes it."""
    movers = (
        {"error": _error(view.movers_error)}
        if view.HasField("movers_error")
        else {"value": tuple(view.movers)}
    )
    shown: dict[str, dict[str, Any]] = {agent: {"value": text} for agent, text in view.shown.items()}
    shown |= {agent: {"error": _error(said)} for agent, said in view.shown_errors.items()}
    return {"movers": movers, "shown": shown}


def outcome_of(outcome: pb.Outcome) -> Outcome:
    """Return the outcome of a message."""
    return Outcome(
        {each.agent: each.amount for each in outcome.rewards},
        outcome.success if outcome.HasField("success") else None,
        from_map(outcome.info),
        outcome.truncated,
        {each.agent: each.role for each in outcome.roles},
    )


def _error(said: str) -> list[str]:
    kind, _, message = said.partition(": ")
    return [kind, message]


# -------- Putting an environment on a server that runs

SECONDS = 600.0
"""For which the server may read the environment's data."""


def register(address: str, name: str, settings: str, certificate: str | None) -> int:
    """Add or replace an environment, given as settings in JSON; return its version.

    Raises ConfigError if the server refuses, EngineError if it is unreachable.
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
