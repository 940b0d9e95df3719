"""One environment server as a run sees it: its channel, its stream, and whether it answered last."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pydantic

from kapelle.environment import WorkerLost
from kapelle.environments.remote import Remote
from kapelle.errors import ConfigError, EngineError, EpisodeError
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
                if future is not None:
                    _settle(future, answer)
        except grpc.RpcError as error:
            how = f"{error.code().name}: {error.details()}"
        finally:
            self._end(f"the environment server at {self._address} is gone ({how})")

    def _end(self, how: str) -> None:
        with self._guard:
            self.lost = how
            left, self._waiting = list(self._waiting.values()), {}
        self._outgoing.put(None)
        for future in left:
            future.set_exception(WorkerLost(how, blamed=False))


def _settle(future: Future[Any], answer: pb.StreamAnswer) -> None:
    kind = answer.WhichOneof("answer")
    if kind == "error":
        future.set_exception(raised(answer.error.code, answer.error.message))
    elif kind is None:
        future.set_exception(
            WorkerLost("the environment server gave an answer that cannot be read", blamed=True)
        )
    else:
        future.set_result(getattr(answer, kind))


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

    def reset(self, question: pb.ResetRequest) -> tuple[Line, Future[Any]]:
        """Ask for a session; the stream on which it lives, and the answer to come."""
        line = self.line()
        return line, line.ask(reset=question)

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
    if tls:
        return grpc.secure_channel(address, _credentials(certificate), options)
    return grpc.insecure_channel(address, options)


def _credentials(certificate: str | None) -> Any:
    if certificate is None:
        return grpc.ssl_channel_credentials()
    try:
        return grpc.ssl_channel_credentials(Path(certificate).expanduser().read_bytes())
    except OSError as error:
        raise ConfigError(
            f"environment.certificate: {certificate} cannot be read: {error.strerror}. Name the PEM file of the "
            "certificate that the servers show, or of the authority that signed it."
        ) from None


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
