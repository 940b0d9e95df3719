"""What all gRPC services share, tested with an echo."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.tls import certificate_here

from kapelle.errors import ConfigError
from kapelle.services.binding import Binding
from kapelle.services.grpc import Caps, GrpcServer, GrpcService, wrong

TOKEN = "the-right-token-0123456789"  # noqa: S105
SMALL = 1 << 16
METHODS = ("One", "Many")


class Echo(GrpcService):
    """Returns its request; `fail`, `wrong` and `wait` select another behaviour."""

    name = "test.Echo"

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self.cancelled = threading.Event()

    def register(self, server: grpc.aio.Server) -> None:
        handlers = {
            "One": grpc.unary_unary_rpc_method_handler(self.one, read, bytes),
            "Many": grpc.unary_stream_rpc_method_handler(self.many, read, bytes),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(self.name, handlers)])

    def go_on(self) -> None:
        """Let waiting calls continue."""
        for loop, event in self.waiting:
            loop.call_soon_threadsafe(event.set)

    async def _gone_on(self) -> None:
        self.waiting.append((asyncio.get_running_loop(), event := asyncio.Event()))
        self.begun.set()
        await event.wait()

    async def one(self, answer: bytes, _: object) -> bytes:
        if answer == b"fail":
            raise RuntimeError("a secret")
        if answer == b"wrong":
            raise wrong("that is wrong")
        if answer == b"wait":
            try:
                await self._gone_on()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return answer

    async def many(self, answer: bytes, context: object) -> AsyncIterator[bytes]:
        yield await self.one(answer, context)


def read(body: bytes) -> bytes:
    if body == b"garbage":
        raise ValueError("no message")
    return body


def ask(
    channel: grpc.Channel, method: str, answer: bytes = b"hello", service: str = "test.Echo", **given: Any
) -> bytes:
    path = f"/{service}/{method}"
    given = {"timeout": 60, **given}
    if method in ("Many", "Watch"):
        return next(channel.unary_stream(path)(answer, **given))  # type: ignore[no-any-return]
    return channel.unary_unary(path)(answer, **given)  # type: ignore[no-any-return]


def refusal(channel: grpc.Channel, method: str, answer: bytes = b"hello", **given: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as raised:
        ask(channel, method, answer, **given)
    return raised.value.code().name, raised.value.details()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(echo: Echo) -> Iterator[GrpcServer]:
    with GrpcServer(Binding(), [echo], Caps(message_bytes=SMALL, calls=2, watchers=1)) as served:
        yield served


@pytest.fixture
def channel(server: GrpcServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as made:
        yield made


@pytest.mark.parametrize("method", METHODS)
def test_an_error_is_a_status_without_a_traceback(channel: grpc.Channel, method: str) -> None:
    assert refusal(channel, method, b"wrong") == ("INVALID_ARGUMENT", "that is wrong")
    assert refusal(channel, method, b"fail") == ("INTERNAL", "The service failed; see its log.")
    unread = ("INVALID_ARGUMENT", "The body is not a message of this method's type.")
    assert refusal(channel, method, b"garbage") == unread
    assert refusal(channel, "None") == ("UNIMPLEMENTED", "Method not found!")
    assert ask(channel, method) == b"hello"


def test_a_failure_is_logged_by_its_type_and_place_without_its_words(
    channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    refusal(channel, "One", b"fail")
    assert "A call of /test.Echo/One failed." in caplog.text
    assert "builtins.RuntimeError" in caplog.text
    assert "in one" in caplog.text, "the place"
    assert "\nRuntimeError: a secret" not in caplog.text


def test_the_size_of_messages_is_limited_also_uncompressed(server: GrpcServer, channel: grpc.Channel) -> None:
    assert refusal(channel, "One", b"x" * (SMALL + 1))[0] == "RESOURCE_EXHAUSTED"
    bomb = b"\0" * (SMALL * 100)
    assert len(gzip.compress(bomb)) < SMALL
    with grpc.insecure_channel(server.address, compression=grpc.Compression.Gzip) as packed:
        assert refusal(packed, "One", bomb)[0] == "RESOURCE_EXHAUSTED"
        assert ask(packed, "One", b"\0" * (SMALL // 2)) == b"\0" * (SMALL // 2)


def test_health_is_answered_while_calls_are_at_their_limit(channel: grpc.Channel, echo: Echo) -> None:
    waiting = [channel.unary_unary("/test.Echo/One").future(b"wait", timeout=60) for _ in range(2)]
    while (answer := refusal_or_none(channel)) is None:
        pass
    assert answer == ("RESOURCE_EXHAUSTED", "2 calls are in progress, which is the limit. Retry later.")
    assert health(channel) == "SERVING"
    while len(echo.waiting) < 2:
        pass
    echo.go_on()
    assert [each.result() for each in waiting] == [b"wait"] * 2
    assert ask(channel, "One") == b"hello"


def refusal_or_none(
    channel: grpc.Channel, method: str = "One", *request: Any, **given: Any
) -> tuple[str, str] | None:
    try:
        ask(channel, method, *request, **given)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return None


def health(channel: grpc.Channel, service: str = "test.Echo") -> str:
    status = health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(service=service), timeout=60
    )
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status.status))


def test_a_cancelled_or_late_call_is_cancelled_in_the_server(channel: grpc.Channel, echo: Echo) -> None:
    request = channel.unary_unary("/test.Echo/One").future(b"wait", timeout=60)
    assert echo.begun.wait(60)
    request.cancel()
    assert echo.cancelled.wait(60)
    echo.cancelled.clear()
    assert refusal(channel, "One", b"wait", timeout=0.1)[0] == "DEADLINE_EXCEEDED"
    assert echo.cancelled.wait(60)


def test_the_end_loses_no_call_that_was_accepted(
    server: GrpcServer, channel: grpc.Channel, echo: Echo
) -> None:
    accepted = channel.unary_unary("/test.Echo/One").future(b"wait", timeout=60)
    watched = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service="test.Echo"), timeout=60
    )
    assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
    assert echo.begun.wait(60)
    drained: list[bool] = []
    draining = threading.Thread(target=lambda: drained.append(server.drain(60)))
    draining.start()
    assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
    while (answer := refusal_or_none(channel)) is None:
        pass
    assert answer[0] == "UNAVAILABLE"
    echo.go_on()
    assert accepted.result() == b"wait"
    draining.join()
    assert drained == [True]


def test_an_endless_call_delays_the_shutdown_only_up_to_its_limit(
    server: GrpcServer, channel: grpc.Channel, echo: Echo
) -> None:
    accepted = channel.unary_unary("/test.Echo/One").future(b"wait", timeout=60)
    assert echo.begun.wait(60)
    assert not server.drain(0.1)
    server.close()
    assert accepted.exception().code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


CREDENTIALS: Mapping[str, tuple[list[tuple[str, str | bytes]], bool]] = {
    "none": ([], False),
    "empty": ([("authorization", "")], False),
    "no token": ([("authorization", "Bearer")], False),
    "wrong": ([("authorization", f"Bearer {TOKEN[:-1]}x")], False),
    "beginning": ([("authorization", f"Bearer {TOKEN[:-1]}")], False),
    "longer": ([("authorization", f"Bearer {TOKEN}x")], False),
    "other scheme": ([("authorization", f"Basic {TOKEN}")], False),
    "bare": ([("authorization", TOKEN)], False),
    "as bytes": ([("authorization-bin", f"Bearer {TOKEN}".encode())], False),
    "elsewhere": ([("token", TOKEN)], False),
    "twice": ([("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer x")], False),
    "right": ([("authorization", f"Bearer {TOKEN}")], True),
    "right, other case": ([("authorization", f"bearer {TOKEN}")], True),
}
"""Credentials, and whether they are valid."""


def test_every_method_is_behind_the_same_check(echo: Echo) -> None:
    """Every method that exists, those of the health service, and one that does not exist, with every credential."""
    methods = [("test.Echo", method) for method in (*METHODS, "None")]
    methods += [("grpc.health.v1.Health", "Check"), ("grpc.health.v1.Health", "Watch"), ("other", "One")]
    with (
        GrpcServer(Binding(token=TOKEN), [echo]) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        for service, method in methods:
            for name, (metadata, admitted) in CREDENTIALS.items():
                answer, why = refusal_or_none(channel, method, b"", service, metadata=metadata) or ("", "")
                assert TOKEN not in why
                assert (answer == "UNAUTHENTICATED") is not admitted, (service, method, name, answer)


def test_silent_streams_without_a_token_hold_up_no_call(echo: Echo) -> None:
    """More of them than the server accepts calls are all answered, and calls with a token beside them."""
    never = threading.Event()

    def silence() -> Iterator[bytes]:
        never.wait(60.0)
        yield b""

    own = [("grpc.use_local_subchannel_pool", 1)]
    known = (("authorization", f"Bearer {TOKEN}"),)
    caps = Caps(calls=20, watchers=4, connections=16)
    with GrpcServer(Binding(token=TOKEN), [echo], caps) as server, ExitStack() as closing:
        closing.callback(never.set)
        channels = [
            closing.enter_context(grpc.insecure_channel(server.address, options=own)) for _ in range(11)
        ]
        silent = [
            each.stream_stream("/test.Echo/One")(silence(), timeout=60)
            for each in channels[1:]
            for _ in range(20)
        ]
        for _ in range(5):
            assert ask(channels[0], "One", metadata=known, timeout=20) == b"hello"
        assert {call.code().name for call in silent} == {"UNAUTHENTICATED"}


def test_tls(echo: Echo, tmp_path: Path) -> None:
    certificate, key = certificate_here(tmp_path)
    binding = Binding("localhost", token=TOKEN, certificate=certificate, key=key)
    trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
    with GrpcServer(binding, [echo]) as server:
        with grpc.secure_channel(server.address, trusted) as channel:
            assert ask(channel, "One", metadata=[("authorization", f"Bearer {TOKEN}")]) == b"hello"
        for other in (
            grpc.insecure_channel(server.address),
            grpc.secure_channel(server.address, grpc.ssl_channel_credentials()),
        ):
            with other as channel:
                assert refusal(channel, "One")[0] == "UNAVAILABLE"
    key.write_text("no key")
    with pytest.raises(ConfigError, match="cannot be used"):
        GrpcServer(binding, [echo]).start()


def test_a_taken_port_is_an_error(server: GrpcServer, echo: Echo) -> None:
    with pytest.raises(ConfigError, match=f"Cannot listen on 127.0.0.1:{server.port}"):
        GrpcServer(Binding(port=server.port), [echo]).start()
