"""HTTP server for services and the viewer, based on Starlette and uvicorn. This module adds checks and deadlines.

    Guard           the single check before every route: token, host name, and origin
    Application     routes for JSON: limits on bodies, errors in OpenAI's format
    HttpServer      uvicorn on its own thread, with deadlines for slow peers

Importing this module requires both packages. Call `check_installed("serve", "starlette", "uvicorn")` first.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import re
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast
from urllib.parse import urlsplit

import h11
import uvicorn
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kapelle.errors import ConfigError
from kapelle.services.binding import Binding, log_failure
from kapelle.services.request_errors import RequestError, wrong
from kapelle.types import Json

T = TypeVar("T")

# -------- The single check before every route

SAFE = ("GET", "HEAD")
"""The HTTP methods that only read data."""
SAFETY = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
"""The response headers that restrict what browsers may do."""


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers of a call by lower-case name. The values of a repeated header are joined by a comma."""
    headers: dict[str, str] = {}
    for key, value in scope["headers"]:
        name, text = key.decode("latin-1").lower(), value.decode("latin-1")
        headers[name] = f"{headers[name]}, {text}" if name in headers else text
    return headers


def check_call(binding: Binding, method: str, headers: Mapping[str, str]) -> None:
    """Raise RequestError unless the token, the host name and the origin of a call permit the call.

    The argument `headers` is the result of `headers_of`, in which a repeated header matches no allowed value.
    """
    if "content-length" in headers and "transfer-encoding" in headers:
        # A proxy in front of this service may use the other length (RFC 9112, 6.3).
        raise RequestError(
            400,
            "Send either `Content-Length` or `Transfer-Encoding`, not both.",
            None,
            "two_lengths",
            {"connection": "close"},
        )
    named = headers.get("host", "")
    host, colon, port = named.rpartition(":")
    if (host if colon and port.isdecimal() else named).lower() not in binding.hosts:
        raise RequestError(
            421,
            "The name in `Host` is not allowed. Add it with --allow-host or, in a training run, with "
            "`environment.address`.",
            None,
            "wrong_host",
        )
    # Programs send a bearer token; browsers send the token as the user's password.
    # Clients of Anthropic's API may send it as `x-api-key`.
    scheme, _, given = headers.get("authorization", "").partition(" ")
    token = given if scheme.lower() == "bearer" else headers.get("x-api-key")
    if scheme.lower() == "basic":
        with suppress(binascii.Error, ValueError):
            token = base64.b64decode(given, validate=True).decode().partition(":")[2]
    if not binding.admits(token):
        raise RequestError(
            401,
            "The token is missing or incorrect. Send it as `Authorization: Bearer TOKEN` or `x-api-key: TOKEN`.",
            None,
            "invalid_api_key",
            {"www-authenticate": 'Basic realm="kapelle", charset="UTF-8"'},
        )
    if method not in SAFE and "origin" in headers:
        place = None
        with suppress(ValueError):
            place = urlsplit(headers["origin"]).netloc.lower()
        if place != named.lower():
            raise RequestError(403, "Pages of other sites may not call this service.", None, "wrong_origin")


class JsonAnswer(JSONResponse):
    """A response with JSON content."""

    def render(self, content: Json) -> bytes:
        """Return the content as ASCII JSON, because UTF-8 cannot encode a lone surrogate, which a model may generate."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def error_response(refusal: RequestError) -> Response:
    """Convert a RequestError to a response in OpenAI's format."""
    return JsonAnswer(refusal.row(), refusal.status, refusal.headers)


class Guard:
    """Forwards calls that `check_call` and `check` permit to an application, and adds headers to every response."""

    def __init__(
        self,
        inner: ASGIApp,
        binding: Binding,
        answer: Callable[[RequestError, Scope], Response],
        headers: Mapping[str, str] = SAFETY,
        check: Callable[[str, Mapping[str, str]], None] = lambda _method, _headers: None,
    ) -> None:
        """Create the guard around an application.

        The function `check` receives the method and headers of a call and may raise RequestError. The function `answer`
        converts a RequestError of a call to a response.
        """
        self._inner, self._binding, self._headers = inner, binding, dict(headers)
        self._check, self._answer = check, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one call."""
        if scope["type"] != "http":  # a WebSocket: the server is started without lifespan
            await send({"type": "websocket.close", "code": 1008})
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = MutableHeaders(raw=list(message["headers"]))
                for name, value in self._headers.items():
                    given.setdefault(name, value)
                message = {**message, "headers": given.raw}
            await send(message)

        headers = headers_of(scope)
        try:
            check_call(self._binding, scope["method"], headers)
            self._check(scope["method"], headers)
        except RequestError as error:
            await self._answer(error, scope)(scope, receive, sending)
            return
        await self._inner(scope, receive, sending)


# -------- Routes for JSON
# Whatever a caller sends, the response is at worst an error in OpenAI's format; tracebacks are logged. If a caller
# disconnects, the work for it is cancelled.

MOST_BYTES = 4 << 20
"""The maximum number of bytes of a request body."""
BODY_SECONDS = 60.0
"""Maximum time in seconds until a request body has arrived."""
SESSION = "x-kapelle-session"
"""The header that contains the name of a session."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a route after checking and parsing."""

    path: str
    """The part of the path that matches `{name:path}`."""
    session: str | None
    """The session that is given in a header or in the path, or None."""
    headers: Mapping[str, str]
    body: Json
    """The JSON object in the body, or None for methods without a body."""
    peer: tuple[str, int] | None = None
    """The address of the caller."""


Handler = Callable[[Call], Awaitable[Response]]


class EventStream(StreamingResponse):
    """A response of server-sent events, each of which is a JSON value or a plain string."""

    def __init__(
        self,
        events: AsyncGenerator[Json | str, None],
        headers: Mapping[str, str] | None = None,
        begun: Sequence[Json | str] = (),
        failed: Callable[[RequestError], Json] = RequestError.row,
        *,
        named: bool = False,
    ) -> None:
        """Create a response that sends the events in `begun`, which were already taken from `events`, and then the remaining events.

        The function `failed` returns the last event after a failure. If `named` is true, the `type` of an event is also
        used as its name.
        """

        async def pieces() -> AsyncIterator[bytes]:
            waiting, over = list(begun), False
            while not over:
                event: Json | str
                try:
                    event = waiting.pop(0) if waiting else await anext(events)
                except StopAsyncIteration:
                    return
                # The status has already been sent, so the last event contains the error.
                except RequestError as error:
                    event, over = failed(error), True
                except Exception as error:
                    event, over = failed(_failed("A stream failed.", error)), True
                text = event.encode() if isinstance(event, str) else JsonAnswer(event).body
                name = f"event: {event['type']}\n".encode() if named and not isinstance(event, str) else b""
                yield name + b"data: " + text + b"\n\n"

        super().__init__(pieces(), headers={**(headers or {}), "content-type": "text/event-stream"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the caller disconnects."""
        # Starlette would use anyio to cancel, which also cancels the cleanup.
        try:
            await until_gone(self.stream_response(send), receive)
        except ClientDisconnect:
            return
        finally:
            await self._events.aclose()


class JsonRoute(Route):
    """A route for JSON, with the format of its errors."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        method: str,
        error_row: Callable[[RequestError], Json],
    ) -> None:
        """Create the route of an endpoint. The function `error_row` returns the body of the response for an error."""
        super().__init__(path, endpoint, methods=[method])
        self.error_row = error_row


def route(
    method: str, path: str, handler: Handler, error_row: Callable[[RequestError], Json] = RequestError.row
) -> Route:
    """Return a route whose handler receives checked calls. In the path, `{name:path}` matches the rest of the path."""

    async def answer(request: Request) -> Response:
        try:
            body = await _json_body(request) if method == "POST" else None
            headers = headers_of(request.scope)
            session = request.scope.get(SESSION, headers.get(SESSION))
            named = session is None or (
                0 < len(session) <= 128
                and session.isascii()
                and all(each.isalnum() or each in "._-" for each in session)
            )
            if not named:
                raise wrong(
                    "Invalid session name. Use 1 to 128 letters, digits or the characters `._-`.", SESSION
                )
            rest = request.path_params.get("name", "")
            call = Call(rest, session, headers, body, request.scope.get("client"))
            return await until_gone(handler(call), request.receive)
        except RequestError:
            raise
        except ClientDisconnect:
            return Response(status_code=GONE)  # the response is not sent, because the caller has disconnected
        except Exception as error:
            raise _failed(f"A call of {request.method} failed.", error) from None

    return JsonRoute(path, answer, method, error_row)


def _failed(what: str, error: Exception) -> RequestError:
    """Log an error, and return a RequestError that does not contain the error's message."""
    log_failure(what, error)
    return RequestError(500, "The service failed; see its log.", None, "internal_error")


async def _json_body(request: Request) -> Json:
    """Return the JSON object in a body. Raises RequestError if the body is too long, too slow, or not a JSON object."""
    headers = headers_of(request.scope)
    too_long = RequestError(413, f"The body has more than {MOST_BYTES:,} bytes.", None, "body_too_long")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError(415, "Compressed bodies are not supported.", None, "compressed_body")
    # Browsers allow pages of other sites to send forms and plain text without a check, but not JSON.
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError(
            415, "The body is not JSON: send `Content-Type: application/json`.", None, "wrong_content_type"
        )
    declared = headers.get("content-length")
    if declared is not None and (
        not declared.isdecimal() or len(declared) > 18 or int(declared) > MOST_BYTES
    ):
        raise too_long
    read = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                read += piece
                if len(read) > MOST_BYTES:
                    raise too_long
    except TimeoutError:
        raise RequestError(
            408, f"The body was not complete after {BODY_SECONDS:g} s.", None, "body_too_slow"
        ) from None
    body = bytes(read)
    try:
        # Unlike `json.loads` it has limits (numbers of 4,300 digits, a depth of 200), and rejects lone surrogates.
        value = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        odd = b"NaN" in body or b"Infinity" in body
        hint = " JSON has no NaN and no Infinity." if odd else ""
        raise RequestError(400, f"The body is not JSON: {error}.{hint}", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(400, "The body must be a JSON object.", None, "invalid_json")
    return value


async def until_gone(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of `work`. If the caller disconnects first, the work is cancelled and ClientDisconnect is raised."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await each


class Application(Guard):
    """An ASGI application with routes behind the guard, and errors in OpenAI's format or the format of their routes."""

    def __init__(self, binding: Binding, routes: Sequence[Route], observe: Observe | None = None) -> None:
        """Create the application. The function `observe` receives the method, route, status and duration in seconds of every finished call.

        If no route matches, the method and the route are empty, because callers could choose any value for them.
        """

        async def answer_error(request: Request, error: Exception) -> Response:
            if isinstance(error, RequestError):
                return self.refused(error, request.scope)
            # There is no route for this path, or no route for this method.
            found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
            if not found:
                return error_response(
                    RequestError(404, "There is no such path on this server.", None, "not_found")
                )
            allowed = ", ".join(sorted({name for each in found for name in each.methods or ()} - {"HEAD"}))
            message, headers = f"This path supports {allowed}.", {"allow": allowed}
            return self.refused(
                RequestError(405, message, None, "method_not_allowed", headers), request.scope
            )

        super().__init__(self._route, binding, self.refused)
        self._routed = Starlette(
            routes=routes, exception_handlers={RequestError: answer_error, HTTPException: answer_error}
        )
        self._routed.router.redirect_slashes = False
        self._routes, self._observe = routes, observe

    def refused(self, error: RequestError, scope: Scope) -> Response:
        """Return the response for the error of a call."""
        own = _in_session(scope)
        for each in self._routes:
            if isinstance(each, JsonRoute) and each.matches(own)[0] is not Match.NONE:
                return JsonAnswer(each.error_row(error), error.status, error.headers)
        return error_response(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one call."""
        if self._observe is None or scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        begun, status = time.monotonic(), GONE

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await super().__call__(scope, receive, sending)
        finally:
            own = _in_session(scope)
            found = (each.path for each in self._routes if each.matches(own)[0] is Match.FULL)
            path = next(found, "")
            self._observe(scope["method"] if path else "", path, status, time.monotonic() - begun)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._routed(_in_session(scope), receive, send)


Observe = Callable[[str, str, int, float], None]
GONE = 499
"""The status that is recorded if the caller disconnects before the response."""


def _in_session(scope: Scope) -> Scope:
    """Return a call in which the session is extracted from a path `/sessions/NAME/v1/…`.

    Such paths support programs in which only the base URL can be configured.
    """
    found = _OF_SESSION.match(scope["path"])
    if found is not None:
        return {**scope, "path": plain_path(found[2]), SESSION: found[1]}
    return {**scope, "path": plain_path(scope["path"])}


_OF_SESSION = re.compile(r"/+sessions/([^/]*)/+(v1/.*)", re.DOTALL)
"""A regular expression for a session and the path in it. The name of the session may be empty if a variable of the program is empty."""


def plain_path(path: str) -> str:
    """Return a path without repeated and trailing slashes, which occur if a URL is joined with an additional slash."""
    return "/" + "/".join(filter(None, path.split("/")))


# -------- The server: uvicorn on its own thread

IDLE_SECONDS = 30
"""The number of seconds without a call after which a connection is closed."""
CONNECTIONS = 4096
"""The maximum number of open connections. Further connections receive the status 503."""


class HttpServer:
    """A context manager that serves an application until it is closed."""

    def __init__(
        self,
        binding: Binding,
        application: ASGIApp,
        idle_seconds: float = IDLE_SECONDS,
        opened: PeerCallback | None = None,
        closed: PeerCallback | None = None,
        sockets: type[asyncio.Protocol] | None = None,
        message_bytes: int = MOST_BYTES,
        door: Path | None = None,
    ) -> None:
        """Bind the port. Raises ConfigError if the port is in use.

        The application also listens at `door`, a Unix socket for all users of this machine. Callers of the Unix socket
        have no address (`scope["client"]` is None). If `sockets` is given, the application also accepts WebSockets with
        messages of at most `message_bytes` bytes.

        A connection without calls is closed after `idle_seconds` seconds. The functions `opened` and `closed` are
        called in the server's event loop with the peer of each connection that opens or closes.
        """
        binding.tls()  # raises ConfigError if the files are invalid
        self._socket = _bound(binding)
        self._door: socket.socket | None = None
        if door is not None:
            self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._door.bind(str(door))
            door.chmod(0o666)
        self.port: int = self._socket.getsockname()[1]
        self.url = binding.url(self.port)
        """The URL of the server."""
        config = uvicorn.Config(
            application,
            http=cast("type[asyncio.Protocol]", partial(HttpConnection, opened=opened, closed=closed)),
            ws=sockets or "none",
            ws_max_size=message_bytes,
            ws_per_message_deflate=False,  # a few compressed bytes may decompress to many
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=math.ceil(idle_seconds),
            limit_concurrency=CONNECTIONS,
            ssl_certfile=binding.certificate,
            ssl_keyfile=binding.key,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="kapelle-http", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)
        assert self._server.started, "its port is bound and its settings are loaded"
        return self

    def drain(self, seconds: float) -> bool:
        """Stop accepting calls, finish the accepted calls, and return whether this took at most `seconds`."""
        self._server.should_exit = True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server immediately, and cancel all calls in progress."""
        self._server.should_exit = self._server.force_exit = True
        if self._thread.ident is not None:
            self._thread.join(5.0)
        self._socket.close()
        if self._door is not None:
            self._door.close()

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._socket, *(() if self._door is None else (self._door,))])
        # A peer that does not close its side (for example, of TLS) would leave an open socket.
        while left := list(self._server.server_state.connections):
            for connection in left:
                connection.transport.abort()
            await asyncio.sleep(0)


def check_free(binding: Binding) -> None:
    """Raise ConfigError if a service cannot listen at the given binding. Commands call this function before they load models."""
    _bound(binding).close()


def _bound(binding: Binding) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            binding.host, binding.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except BaseException:
            made.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {binding.host}:{binding.port}: {error.strerror}. Use another port or host."
        ) from None
    return made


# -------- One connection, with two deadlines that uvicorn lacks: for slow request heads, and for peers that stop reading

HEAD_SECONDS = 30.0
"""Maximum time in seconds for the head of a call to arrive, measured from its first byte or from the start of the connection."""
STALL_SECONDS = 60.0
"""The number of seconds after which the connection to a peer that does not read is aborted."""


KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""The number of seconds until an idle peer is probed, the number of seconds between probes, and the number of probes. Probes
are needed because crashed machines do not close their connections."""

Peer = tuple[str, int]
"""The address and port of a caller."""


PeerCallback = Callable[[Peer], None]


class HttpConnection(H11Protocol):
    """An HTTP/1.1 connection with deadlines for slow peers."""

    def __init__(
        self, *given: Any, opened: PeerCallback | None, closed: PeerCallback | None, **named: Any
    ) -> None:
        super().__init__(*given, **named)
        self._opened, self._closed = opened, closed
        self._deadlines: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline for the head of the first call."""
        super().connection_made(transport)
        if self._opened is not None and self.client is not None:
            self._opened(self.client)
            held: socket.socket = transport.get_extra_info("socket")
            held.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):  # not available on every system
                    held.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._deadline("head", HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Process received bytes, and manage the deadline for the head of a call."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._deadline("head", None)
        elif "head" not in self._deadlines:
            self._deadline("head", HEAD_SECONDS)

    def pause_writing(self) -> None:
        """Start the deadline for a peer that does not read."""
        super().pause_writing()
        self._deadline("stall", STALL_SECONDS)

    def resume_writing(self) -> None:
        """Remove the deadline because the peer has read."""
        super().resume_writing()
        self._deadline("stall", None)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, even if the last response was not read."""
        super().timeout_keep_alive_handler()
        self._deadline("close", STALL_SECONDS)

    def shutdown(self) -> None:
        """Close the connection once all accepted calls are answered and their responses are read."""
        super().shutdown()
        if self.transport.is_closing():
            self._deadline("close", STALL_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove all deadlines and report that the connection was closed."""
        for what in list(self._deadlines):
            self._deadline(what, None)
        super().connection_lost(exc)
        if self._closed is not None and self.client is not None:
            self._closed(self.client)

    def _deadline(self, what: str, seconds: float | None) -> None:
        """Set a deadline after which the connection is aborted. A later call replaces the deadline, and None removes it."""
        if (timer := self._deadlines.pop(what, None)) is not None:
            timer.cancel()
        if seconds is not None:
            self._deadlines[what] = self.loop.call_later(seconds, self.transport.abort)
