"""A gRPC server that runs on its own thread, with one check before every method, a health service, limits, and an orderly shutdown.

    with GrpcServer(Binding(), [service]) as server:
        print(server.address)

Importing this module requires grpcio. Call `check_installed("serve", "grpc", "grpc_health")` first.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from kapelle.runtime.wire import LARGEST  # imported before grpcio, because it sets how much grpcio logs

# isort: split
import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import OVERALL_HEALTH
from grpc_health.v1.health import aio as health
from grpc_health.v1.health_pb2 import HealthCheckResponse

from kapelle.errors import ConfigError
from kapelle.services.binding import Binding, in_url, log_failure


@dataclass
class CallRejected(Exception):
    """The error response to a call. The error may be raised anywhere inside the call."""

    code: str
    """The name of the status code, such as `NOT_FOUND`."""
    message: str


def wrong(message: str) -> CallRejected:
    """Return the error for a malformed request."""
    return CallRejected("INVALID_ARGUMENT", message)


def busy(message: str) -> CallRejected:
    """Return the error for a call for which there is currently no capacity."""
    return CallRejected("RESOURCE_EXHAUSTED", message)


def leaving() -> CallRejected:
    """Return the error for a call that arrives during shutdown."""
    return CallRejected("UNAVAILABLE", "The server is shutting down. Use another server, or retry later.")


# -------- The single check before every method, which also turns errors into status codes; tracebacks are logged

HEALTH = "/grpc.health.v1.Health/"
"""The prefix of the methods of the health service, which have their own limit."""


@dataclass(frozen=True, slots=True)
class Caps:
    """The limits of one server."""

    message_bytes: int = LARGEST
    """The maximum size of a decompressed message in bytes."""
    calls: int = 1024
    """The maximum number of calls in progress."""
    watchers: int = 64
    """The maximum number of calls of the health service in progress."""
    connections: int = 256
    """The maximum number of open connections. Further connections are closed immediately."""
    pending: int = 32_768
    """The maximum number of calls that wait for the check of their token. If there are more, grpcio cancels some calls, with or
    without a token."""


class GrpcGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc] # grpc ships no types
    """Admits calls, counts the calls in progress, and converts errors to status codes."""

    def __init__(self, binding: Binding, caps: Caps) -> None:
        """Create the guard. The argument `binding` defines who may call, and `caps` defines the limits."""
        self._binding = binding
        self._most = {"calls": caps.calls, "watchers": caps.watchers}
        self._under_way = dict.fromkeys(self._most, 0)
        self.idle = asyncio.Event()
        """An event that is set while no call is in progress, except calls of the health service."""
        self.idle.set()
        self.closed = False
        """Whether only calls of the health service are accepted."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> grpc.RpcMethodHandler | None:
        """Return the handler of a method with the check in front of it, or None."""
        # A caller must send exactly one `authorization` entry, with a bearer token.
        given = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        alone = given[0] if len(given) == 1 and isinstance(given[0], str) else ""
        scheme, _, token = alone.partition(" ")
        if not self._binding.admits(token if scheme.lower() == "bearer" else None):
            return grpc.stream_stream_rpc_method_handler(_unauthenticated)
        handler = await continuation(details)
        if handler is None:
            return None

        # The handler parses the body itself, so that an invalid body gets the same reply as other errors.
        method = details.method
        kind = "watchers" if method.startswith(HEALTH) else "calls"

        def read(body: bytes) -> Any:
            try:
                return handler.request_deserializer(body)
            except Exception:
                raise wrong("The body is not a message of this method's type.") from None

        async def one(body: bytes, context: grpc.aio.ServicerContext) -> Any:
            async with self._accepted(kind, method, context):
                return await handler.unary_unary(read(body), context)

        async def many(body: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with self._accepted(kind, method, context):
                answers = handler.unary_stream(read(body), context)
                if asyncio.iscoroutine(answers):  # the method writes its responses itself
                    await answers
                    return
                async for answer in answers:
                    yield answer

        assert not handler.request_streaming, "no method of this server takes a stream"
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(many, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(one, None, handler.response_serializer)

    @asynccontextmanager
    async def _accepted(
        self, kind: str, method: str, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[None]:
        """Return a context manager that counts a call in progress. If the call raises an error, the call is ended with a status code."""
        try:
            if self.closed and kind != "watchers":
                raise leaving()
            most = self._most[kind]
            if self._under_way[kind] >= most:
                raise busy(f"{most:,} {kind} are in progress, which is the limit. Retry later.")
            self._under_way[kind] += 1
            if kind != "watchers":
                self.idle.clear()
            try:
                yield
            finally:
                self._under_way[kind] -= 1
                if not self._under_way["calls"]:
                    self.idle.set()
        except CallRejected as error:
            await context.abort(grpc.StatusCode[error.code], error.message)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            log_failure(f"A call of {method} failed.", error)
            await context.abort(grpc.StatusCode.INTERNAL, "The service failed; see its log.")


async def _unauthenticated(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> NoReturn:
    # Respond to every kind of call without reading it.
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "The token is missing or incorrect. Send it as the metadata `authorization: Bearer TOKEN`.",
    )
    raise AssertionError("`abort` raises")


PING_SECONDS = 20
"""The number of seconds without traffic after which a connection is pinged, and the maximum number of seconds until the reply."""
HANDSHAKE_SECONDS = 10
"""Maximum time in seconds until a new connection has finished its handshake."""
IDLE_SECONDS = 300
"""The number of seconds without a call after which a connection is closed. The client opens another connection for its next call."""
CLOSING_SECONDS = 5.0
"""Maximum time in seconds for cancelled calls to finish before their thread is abandoned."""
LAST_SECONDS = 0.5
"""The time in seconds at the end of a shutdown in which late calls still receive a status code."""
METADATA_BYTES = 16 << 10
"""The maximum number of bytes of the headers of a call."""


class GrpcService:
    """A service that is defined by a proto file."""

    name: str
    """The full name of the service in the proto file, which the health service also uses."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add the methods of the service to a server. The methods must not block the event loop of the server."""
        raise NotImplementedError


class GrpcServer:
    """A context manager for a server that runs until it is closed."""

    def __init__(self, binding: Binding, services: Sequence[GrpcService], caps: Caps | None = None) -> None:
        """Create the server. The argument `binding` defines where to listen and who may call."""
        # The guard logs errors; grpcio would log a traceback for every cancelled call.
        logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
        self._binding, self._services, self._caps = binding, tuple(services), caps or Caps()
        self._drained = False
        self.port = 0
        """The port, which is available after the server has started."""
        self.address = ""
        """The host and the port, which are available after the server has started."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._begun: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, name="kapelle-grpc", daemon=True)

    def start(self) -> None:
        """Start the server, and return when calls are accepted. Raises ConfigError if the server cannot listen."""
        self._thread.start()
        self.port = self._begun.result()
        self.address = self._binding.url(self.port).partition("://")[2]

    def drain(self, seconds: float) -> bool:
        """Stop accepting calls, finish the accepted calls, and return whether this took at most `seconds`."""
        assert self._loop is not None, "the server has started"
        return asyncio.run_coroutine_threadsafe(self._drain(seconds), self._loop).result()

    def close(self) -> None:
        """Stop the server immediately, and cancel all calls in progress."""
        if self._loop is not None and self._over is not None:
            with suppress(RuntimeError):  # the loop has already ended
                self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(CLOSING_SECONDS)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._begun.done():
                raise  # after the start, the thread reports the error
            self._begun.set_exception(error)

    async def _serve(self) -> None:
        self._guard = GrpcGuard(self._binding, self._caps)
        caps = self._caps
        options = [
            (
                "grpc.so_reuseport",
                0,
            ),  # otherwise a second server on this port would receive half of the calls
            ("grpc.max_receive_message_length", caps.message_bytes),
            ("grpc.max_send_message_length", caps.message_bytes),
            ("grpc.absolute_max_metadata_size", METADATA_BYTES),
            ("grpc.max_metadata_size", METADATA_BYTES),
            ("grpc.max_allowed_incoming_connections", caps.connections),
            ("grpc.max_concurrent_streams", caps.calls + caps.watchers),  # limits of one connection
            ("grpc.server.max_pending_requests", caps.pending),
            ("grpc.server.max_pending_requests_hard_limit", caps.pending),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
            ("grpc.max_connection_idle_ms", IDLE_SECONDS * 1000),
            ("grpc.keepalive_time_ms", PING_SECONDS * 1000),
            ("grpc.keepalive_timeout_ms", PING_SECONDS * 1000),
            ("grpc.http2.min_ping_interval_without_data_ms", PING_SECONDS * 500),
        ]
        server = grpc.aio.server(interceptors=[self._guard], options=options)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        for service in self._services:
            service.register(server)
            await self._health.set(service.name, HealthCheckResponse.SERVING)
        await self._health.set(OVERALL_HEALTH, HealthCheckResponse.SERVING)
        where, tls = f"{in_url(self._binding.host)}:{self._binding.port}", self._binding.tls()
        try:
            if tls is None:
                port = int(server.add_insecure_port(where))
            else:
                port = int(server.add_secure_port(where, grpc.ssl_server_credentials([tls])))
        except RuntimeError:
            raise ConfigError(
                f"Cannot listen on {where}: the port is taken, or the host is not this machine. Use another --port or --host."
            ) from None
        await server.start()
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._begun.set_result(port)
        await self._over.wait()
        await server.stop(LAST_SECONDS if self._drained else None)

    async def _drain(self, seconds: float) -> bool:
        await self._health.enter_graceful_shutdown()
        self._guard.closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._guard.idle.wait()
                self._drained = True
        await asyncio.sleep(LAST_SECONDS)
        return self._drained
