"""The one check that stands before every gRPC method, and the one place where errors become status codes.

Whatever a caller sends, it gets a status code and a sentence at worst; tracebacks go to the log of this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from kapelle.services.binding import Binding
from kapelle.services.grpc.refusals import Refused, busy, leaving, wrong
from kapelle.services.log import log_failure
from kapelle.wire import LARGEST

HEALTH = "/grpc.health.v1.Health/"
"""Begins the methods that are answered also when there is no room for others."""


@dataclass(frozen=True, slots=True)
class Caps:
    """What one server holds at once."""

    message_bytes: int = LARGEST
    """Of one message, in or out, when it is decompressed."""
    calls: int = 1024
    """Calls of one answer under way."""
    streams: int = 256
    """Calls that stream, which may stay open for long."""
    watchers: int = 64
    """Calls of the health service."""


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc] # grpc ships no types
    """Admits a call, counts it while it is under way, and makes a status code of what it raises."""

    def __init__(self, binding: Binding, caps: Caps) -> None:
        """Take who may call, and how many at once."""
        self._binding = binding
        self._most = {"calls": caps.calls, "streams": caps.streams, "watchers": caps.watchers}
        self._under_way = dict.fromkeys(self._most, 0)
        self._idle = asyncio.Event()
        self._idle.set()
        self.closed = False
        """Whether only the health service is answered any more."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> grpc.RpcMethodHandler | None:
        """Return the method's handler behind the check; None where there is no such method."""
        given = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        if not self._binding.admits(_bearer(given)):
            return grpc.stream_stream_rpc_method_handler(_unauthenticated)
        handler = await continuation(details)
        return None if handler is None else self._guarded(handler, details.method)

    async def idle(self) -> None:
        """Return when no call is under way, those of the health service aside."""
        await self._idle.wait()

    def _guarded(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        """Return a handler that reads the body itself, so that one which cannot be read is refused like anything else."""
        # Each kind of call has another number of messages in and out, and so another form of handler.
        kind = (
            "watchers" if method.startswith(HEALTH) else "streams" if handler.response_streaming else "calls"
        )

        def read(body: bytes) -> Any:
            try:
                return handler.request_deserializer(body)
            except Exception:
                raise wrong("The body is no message of this method's type.") from None

        async def one(body: bytes, context: grpc.aio.ServicerContext) -> Any:
            async with self._accepted(kind, method, context):
                return await handler.unary_unary(read(body), context)

        async def many(body: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with self._accepted(kind, method, context):
                answers = handler.unary_stream(read(body), context)
                if asyncio.iscoroutine(answers):  # it writes by itself
                    await answers
                    return
                async for answer in answers:
                    yield answer

        async def both(bodies: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with self._accepted(kind, method, context):
                questions = (read(body) async for body in bodies)
                async for answer in handler.stream_stream(questions, context):
                    yield answer

        assert handler.response_streaming or not handler.request_streaming, "no method of ours only listens"
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(both, None, handler.response_serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(many, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(one, None, handler.response_serializer)

    @asynccontextmanager
    async def _accepted(
        self, kind: str, method: str, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[None]:
        """Count a call while it is under way; what it raises ends it with a status code."""
        try:
            self._check_room(kind)
            self._count(kind, 1)
            try:
                yield
            finally:
                self._count(kind, -1)
        except Refused as refused:
            await context.abort(grpc.StatusCode[refused.code], refused.message)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            log_failure(f"A call of {method} failed.", error)
            await context.abort(grpc.StatusCode.INTERNAL, "The service failed; its log says why.")

    def _check_room(self, kind: str) -> None:
        if self.closed and kind != "watchers":
            raise leaving()
        if self._under_way[kind] >= self._most[kind]:
            raise busy(f"{self._most[kind]:,} {kind} are under way, the most there may be. Call again later.")

    def _count(self, kind: str, more: int) -> None:
        self._under_way[kind] += more
        if any(count for each, count in self._under_way.items() if each != "watchers"):
            self._idle.clear()
        else:
            self._idle.set()


def _bearer(given: list[str | bytes]) -> str | None:
    """Return the token of the one `authorization` that a call carries; None for none, several, or another scheme."""
    if len(given) != 1 or not isinstance(given[0], str):
        return None
    scheme, _, token = given[0].partition(" ")
    return token if scheme.lower() == "bearer" else None


async def _unauthenticated(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> NoReturn:
    # Answers every kind of call, and reads nothing of it.
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "The token is missing or wrong. Send it as the metadata `authorization: Bearer TOKEN`.",
    )
    raise AssertionError("`abort` raises")
