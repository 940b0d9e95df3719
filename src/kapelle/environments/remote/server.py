"""One environment server as a run sees it: its channel, its stream, and whether it answered last."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc

from kapelle.environments.remote.line import Busy, Line, raised
from kapelle.errors import ConfigError
from kapelle.wire import environment_v1_pb2 as pb
from kapelle.wire import environment_v1_pb2_grpc as pb_grpc

MESSAGE_BYTES = 64 << 20
"""The most that is accepted of one message."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before a server that did not answer is asked again."""
PING_SECONDS = 20
"""After which a silent connection is asked whether its other side is there."""


class Server:
    """One server; any thread may ask."""

    def __init__(self, address: str, certificate: str | None, token: str | None, *, tls: bool) -> None:
        """Connect when first asked. ConfigError for a certificate that cannot be read."""
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
        """Ask something outside a session and wait; Busy where nobody answers, or what the environment raised."""
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
        """Note that it did not answer, and leave it alone for a while, longer each time."""
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
    """Return a channel, which connects when it is first used. ConfigError for a certificate that cannot be read."""
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
