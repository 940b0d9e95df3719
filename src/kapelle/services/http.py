"""HTTP for services and the viewer: Starlette routes and answers, uvicorn serves; this module adds what both lack.

    Guard           the one check before every route: who calls, by which host name, and from which page
    Application     routes that take and answer JSON: bodies within limits, errors in OpenAI's form
    HttpServer      uvicorn on a thread of its own, with deadlines for peers that are too slow

Importing this module needs both packages; call `check_installed("serve", "starlette", "uvicorn")` first.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
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
from kapelle.services.refusals import Refusal, wrong
from kapelle.types import Json

T = TypeVar("T")

# -------- The one check before every route

SAFE = ("GET", "HEAD")
"""Methods that only read."""
SAFETY = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
"""What browsers may do with an answer."""


def headers_of(scope: Scope) -> dict[str, str]:
    """Return a call's headers by name in lower case; values of a header that was sent twice are joined by a comma."""
    headers: dict[str, str] = {}
    for key, value in scope["headers"]:
        name, text = key.decode("latin-1").lower(), value.decode("latin-1")
        headers[name] = f"{headers[name]}, {text}" if name in headers else text
    return headers


def check_call(binding: Binding, method: str, headers: Mapping[str, str]) -> None:
    """Raise Refusal unless the caller may call, by its token, the host name that it calls, and the page that it comes from.

    `headers` are those of `headers_of`: joined values match nothing, so sending a header twice gains nothing.
    """
    if "content-length" in headers and "transfer-encoding" in headers:
        # Two lengths of one body: a proxy before this service may have taken the other one (RFC 9112, 6.3).
        raise Refusal(
            400,
            "A call has `Content-Length` or `Transfer-Encoding`, not both.",
            None,
            "two_lengths",
            {"connection": "close"},
        )
    named = headers.get("host", "")
    host, colon, port = named.rpartition(":")
    if (host if colon and port.isdecimal() else named).lower() not in binding.hosts:
        raise Refusal(
            421,
            "This service is not known by the name in `Host`. Add it with --allow-host; the server of a "
            "training run has one name, `environment.address`.",
            None,
            "wrong_host",
        )
    # The token is a bearer's, or the password that a browser asks its user for.
    scheme, _, given = headers.get("authorization", "").partition(" ")
    token = given if scheme.lower() == "bearer" else None
    if scheme.lower() == "basic":
        with suppress(binascii.Error, ValueError):
            token = base64.b64decode(given, validate=True).decode().partition(":")[2]
    if not binding.admits(token):
        raise Refusal(
            401,
            "The token is missing or wrong. Send it as `Authorization: Bearer TOKEN`.",
            None,
            "invalid_api_key",
            {"www-authenticate": 'Basic realm="kapelle", charset="UTF-8"'},
        )
    if method not in SAFE and "origin" in headers:
        place = None
        with suppress(ValueError):
            place = urlsplit(headers["origin"]).netloc.lower()
        if place != named.lower():
            raise Refusal(403, "Pages of other sites may not call this service.", None, "wrong_origin")


class JsonAnswer(JSONResponse):
    """An answer in JSON."""

    def render(self, content: Json) -> bytes:
        """Return JSON in ASCII: a model may write half a character (a lone surrogate), which UTF-8 cannot hold."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def answer_refusal(refusal: Refusal) -> Response:
    """Return a refusal as OpenAI's clients read it."""
    return JsonAnswer(refusal.row(), refusal.status, refusal.headers)


class Guard:
    """Passes a call on to an application if `check_call` and `check` let it, and adds headers to every answer."""

    def __init__(
        self,
        inner: ASGIApp,
        binding: Binding,
        headers: Mapping[str, str] = SAFETY,
        check: Callable[[str, Mapping[str, str]], None] = lambda _method, _headers: None,
        answer: Callable[[Refusal], Response] = answer_refusal,
    ) -> None:
        """`check` takes a call's method and headers and may raise Refusal too; `answer` says how refusals are answered."""
        self._inner, self._binding, self._headers = inner, binding, dict(headers)
        self._check, self._answer = check, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        if scope["type"] != "http":  # a web socket: the server is started without lifespan
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
        except Refusal as refusal:
            await self._answer(refusal)(scope, receive, sending)
            return
        await self._inner(scope, receive, sending)


# -------- Routes that take and answer JSON
#
# Whatever a caller sends, the worst answer is an error in OpenAI's form; tracebacks go to this process's log. Work for a caller
# that goes away is cancelled.

MOST_BYTES = 4 << 20
"""Of one body."""
BODY_SECONDS = 60.0
"""Within which a body has to arrive."""
SESSION = "x-kapelle-session"
"""Header that names a session."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a route, checked and read."""

    path: str
    """The part of the path that the route's `{name:path}` took."""
    session: str | None
    """The session that the caller names, by header or by path; None without one."""
    headers: Mapping[str, str]
    body: Json
    """The body's JSON object; None for methods without a body."""
    peer: tuple[str, int] | None = None
    """The other end of the connection that it came by."""


Handler = Callable[[Call], Awaitable[Response]]


class EventStream(StreamingResponse):
    """Server-sent events: JSON values, or texts that are sent as they are."""

    def __init__(
        self,
        events: AsyncGenerator[Json | str, None],
        headers: Mapping[str, str] | None = None,
        begun: Sequence[Json | str] = (),
        failed: Callable[[Refusal], Json] = Refusal.row,
        *,
        named: bool = False,
    ) -> None:
        """Send the events in `begun`, which the caller took from `events` already, and then the others.

        `failed` is the event of a failure on the way. `named` ones also have their `type` as the event's name.
        """

        async def pieces() -> AsyncIterator[bytes]:
            waiting, over = list(begun), False
            while not over:
                event: Json | str
                try:
                    event = waiting.pop(0) if waiting else await anext(events)
                except StopAsyncIteration:
                    return
                # The status is sent already, so the last event is an error that clients read.
                except Refusal as refusal:
                    event, over = failed(refusal), True
                except Exception as error:
                    event, over = failed(_failed("A stream failed.", error)), True
                text = event.encode() if isinstance(event, str) else JsonAnswer(event).body
                name = f"event: {event['type']}\n".encode() if named and not isinstance(event, str) else b""
                yield name + b"data: " + text + b"\n\n"

        super().__init__(pieces(), headers={**(headers or {}), "content-type": "text/event-stream"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the caller goes away."""
        # Starlette's own would cancel through anyio, whose cancelled scopes also break off what cleans up.
        try:
            await until_gone(self.stream_response(send), receive)
        except ClientDisconnect:
            return
        finally:
            await self._events.aclose()


def route(method: str, path: str, handler: Handler) -> Route:
    """Return a route whose handler gets checked calls; `{name:path}` in the path takes everything below it."""

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
                raise wrong("A session's name has 1 to 128 letters, digits and any of `._-`.", SESSION)
            rest = request.path_params.get("name", "")
            call = Call(rest, session, headers, body, request.scope.get("client"))
            return await until_gone(handler(call), request.receive)
        except Refusal:
            raise
        except ClientDisconnect:
            return Response(status_code=GONE)  # reaches no one: the caller is gone
        except Exception as error:
            raise _failed(f"A call of {request.method} failed.", error) from None

    return Route(path, answer, methods=[method])


def _failed(what: str, error: Exception) -> Refusal:
    """Log an error and return a refusal that only says where to look."""
    log_failure(what, error)
    return Refusal(500, "The service failed; its log says why.", None, "internal_error")


async def _json_body(request: Request) -> Json:
    """Return a body's JSON object; Refusal for a body that is too long, too slow, or not a JSON object."""
    headers = headers_of(request.scope)
    too_long = Refusal(413, f"The body has more than {MOST_BYTES:,} bytes.", None, "body_too_long")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(415, "Compressed bodies are not read. Send the body as it is.", None, "compressed_body")
    # Pages of other sites can send forms and plain text without asking first; JSON they cannot.
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(
            415, "The body is no JSON: send `Content-Type: application/json`.", None, "wrong_content_type"
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
        raise Refusal(
            408, f"The body was not complete after {BODY_SECONDS:g} s.", None, "body_too_slow"
        ) from None
    body = bytes(read)
    try:
        # Unlike `json.loads` it is bounded: numbers of 4,300 digits, a depth of 200; and half characters are refused.
        value = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        odd = b"NaN" in body or b"Infinity" in body
        hint = " JSON has no NaN and no Infinity; send a finite number." if odd else ""
        raise Refusal(400, f"The body is no JSON: {error}.{hint}", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise Refusal(400, "The body must be a JSON object.", None, "invalid_json")
    return value


async def until_gone(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of work; cancel it and raise ClientDisconnect if the caller goes away first."""

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
    """Routes behind the guard, an ASGI application; errors are answered in OpenAI's form."""

    def __init__(self, binding: Binding, routes: Sequence[Route], observe: Observe | None = None) -> None:
        """`observe` is told of every call that is over: its method, the route, the status and how many seconds it took.

        A call that no route takes has an empty route, and its method is left out: callers choose both.
        """

        async def refused(request: Request, error: Exception) -> Response:
            if isinstance(error, Refusal):
                return answer_refusal(error)
            # Starlette has found no route for this path, or none for this method.
            found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
            if not found:
                return answer_refusal(Refusal(404, "There is no such path here.", None, "not_found"))
            allowed = ", ".join(sorted({name for each in found for name in each.methods or ()} - {"HEAD"}))
            message, headers = f"This path takes {allowed}.", {"allow": allowed}
            return answer_refusal(Refusal(405, message, None, "method_not_allowed", headers))

        super().__init__(self._route, binding)
        self._routed = Starlette(routes=routes, exception_handlers={Refusal: refused, HTTPException: refused})
        self._routed.router.redirect_slashes = False
        self._routes, self._observe = routes, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
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
"""Status of a call whose caller went away before its answer."""


def _in_session(scope: Scope) -> Scope:
    """Return a call with its session: `/sessions/NAME/v1/…` names one, for programs that take only an address."""
    parts = scope["path"].split("/", 3)
    if len(parts) == 4 and parts[:2] == ["", "sessions"] and parts[3].startswith("v1/"):
        return {**scope, "path": f"/{parts[3]}", SESSION: parts[2]}
    return scope


# -------- The server: uvicorn on a thread of its own

IDLE_SECONDS = 30
"""Seconds without a call after which a connection is closed."""
CONNECTIONS = 4096
"""Connections open at once; further ones are told that the service is busy."""


class HttpServer:
    """Serves an application until it is closed; a context manager."""

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
        """Bind the port; raises ConfigError if it is taken.

        The application also answers at `door`, a Unix socket that is made for every user of this machine; its callers have no
        address (`scope["client"]` is None).

        With `sockets` the application answers WebSockets too, whose messages have at most `message_bytes`.

        A connection without a call is closed after `idle_seconds`. `opened` and `closed` are called in the server's event loop
        with the other end of each connection that opens or closes.
        """
        binding.tls()  # refuses files that cannot be used
        self._socket = _bound(binding)
        self._door: socket.socket | None = None
        if door is not None:
            self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._door.bind(str(door))
            door.chmod(0o666)
        self.port: int = self._socket.getsockname()[1]
        self.url = binding.url(self.port)
        """Its address."""
        config = uvicorn.Config(
            application,
            http=cast("type[asyncio.Protocol]", partial(HttpConnection, opened=opened, closed=closed)),
            ws=sockets or "none",
            ws_max_size=message_bytes,
            ws_per_message_deflate=False,  # a few compressed bytes may unpack to very many
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
        """Stop accepting calls, answer those that were accepted, and return whether all were within `seconds`."""
        self._server.should_exit = True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop now; calls under way are cancelled."""
        self._server.should_exit = self._server.force_exit = True
        if self._thread.ident is not None:
            self._thread.join(5.0)
        self._socket.close()
        if self._door is not None:
            self._door.close()

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._socket, *(() if self._door is None else (self._door,))])
        # A peer that does not close its side (of TLS, say) would leave a socket open after this loop.
        while left := list(self._server.server_state.connections):
            for connection in left:
                connection.transport.abort()
            await asyncio.sleep(0)


def check_free(binding: Binding) -> None:
    """Raise ConfigError if a service could not listen now: commands ask before they load models."""
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
            f"Nothing can listen on {binding.host}:{binding.port}: {error.strerror}. Name another port or host."
        ) from None
    return made


# -------- One connection, with deadlines that uvicorn lacks: for a head that comes slowly, and for a peer that stops reading

HEAD_SECONDS = 30.0
"""Seconds within which the head of a call has to arrive, from its first byte or the start of the connection."""
STALL_SECONDS = 60.0
"""Seconds after which the connection to a peer that reads nothing is aborted."""


KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds until the system probes an idle peer, seconds between two probes, and their number: a machine that vanished does
not close its connections."""

Peer = tuple[str, int]
"""Address and port of the other end of a connection."""


PeerCallback = Callable[[Peer], None]


class HttpConnection(H11Protocol):
    """Speaks HTTP/1.1 with one peer, which may be slow within limits."""

    def __init__(
        self, *given: Any, opened: PeerCallback | None, closed: PeerCallback | None, **named: Any
    ) -> None:
        super().__init__(*given, **named)
        self._opened, self._closed = opened, closed
        self._deadlines: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a call."""
        super().connection_made(transport)
        if self._opened is not None and self.client is not None:
            self._opened(self.client)
            held: socket.socket = transport.get_extra_info("socket")
            held.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):  # not on every system
                    held.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._deadline("head", HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Take bytes; the deadline of a head ends with the head."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._deadline("head", None)
        elif "head" not in self._deadlines:
            self._deadline("head", HEAD_SECONDS)

    def pause_writing(self) -> None:
        """Wait for the peer to read."""
        super().pause_writing()
        self._deadline("stall", STALL_SECONDS)

    def resume_writing(self) -> None:
        """Continue: the peer has read."""
        super().resume_writing()
        self._deadline("stall", None)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, even one whose last answer was not read."""
        super().timeout_keep_alive_handler()
        self._deadline("close", STALL_SECONDS)

    def shutdown(self) -> None:
        """Close when accepted calls are answered and their answers are read."""
        super().shutdown()
        if self.transport.is_closing():
            self._deadline("close", STALL_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        for what in list(self._deadlines):
            self._deadline(what, None)
        super().connection_lost(exc)
        if self._closed is not None and self.client is not None:
            self._closed(self.client)

    def _deadline(self, what: str, seconds: float | None) -> None:
        """Abort the connection after `seconds`, unless this deadline is set anew before; None takes it back."""
        if (timer := self._deadlines.pop(what, None)) is not None:
            timer.cancel()
        if seconds is not None:
            self._deadlines[what] = self.loop.call_later(seconds, self.transport.abort)
