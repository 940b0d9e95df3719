"""An ASGI application of a few routes: one table, one check before each of them, one place where errors become answers.

Whatever a caller sends, it gets an answer in OpenAI's error form at worst; tracebacks go to the log of this process. A
call whose caller goes away is cancelled.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kapelle.services.binding import Binding
from kapelle.services.http.refusals import Refusal, wrong
from kapelle.services.log import log_failure
from kapelle.types import Json

# -------- The one check that stands before every route: who calls, under which name, from which page, with how large a body

SAFE = ("GET", "HEAD")
"""Methods that change nothing."""


def check_call(binding: Binding, method: str, headers: Mapping[str, str]) -> None:
    """Raise Refusal unless the caller may call: its token, the name it calls by, and the page that it comes from.

    `headers` are by name in lower case; one that was sent twice is joined by a comma and so never matches.
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
    if _without_port(named) not in binding.hosts:
        raise Refusal(
            421,
            "This service is not known by the name in `Host`. Add it with --allow-host; the server of a "
            "training run has one name, `environment.address`.",
            None,
            "wrong_host",
        )
    if not binding.admits(_token(headers.get("authorization"))):
        raise Refusal(
            401,
            "The token is missing or wrong. Send it as `Authorization: Bearer TOKEN`.",
            None,
            "invalid_api_key",
            {"www-authenticate": 'Basic realm="kapelle", charset="UTF-8"'},
        )
    origin = headers.get("origin")
    if method not in SAFE and origin is not None and _place(origin) != named.lower():
        raise Refusal(403, "Pages of other sites may not call this service.", None, "wrong_origin")


def check_body(headers: Mapping[str, str], most: int) -> None:
    """Raise Refusal for a body that is no plain JSON or is declared to be longer than `most` bytes."""
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(415, "Compressed bodies are not read. Send the body as it is.", None, "compressed_body")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(
            415, "The body is no JSON: send `Content-Type: application/json`.", None, "wrong_content_type"
        )
    declared = headers.get("content-length")
    if declared is not None and (not declared.isdecimal() or len(declared) > 18 or int(declared) > most):
        raise too_long(most)


def too_long(most: int) -> Refusal:
    """Return the refusal of a body with more than `most` bytes."""
    return Refusal(413, f"The body has more than {most:,} bytes.", None, "body_too_long")


def _token(authorization: str | None) -> str | None:
    """Return the token of a header, as a bearer's or as the password that a browser asks for; None for none."""
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() == "bearer":
        return given
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return None


def _place(origin: str) -> str | None:
    """Return the host and port of a page's origin; None for a text that is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()


T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
"""What a server can serve."""

MOST_BYTES = 4 << 20
"""Of one body."""
BODY_SECONDS = 60.0
"""For which a body may take to arrive."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a route."""

    path: str
    """What follows the route's own path."""
    session: str | None
    """The session that the caller names, by header or by path; None where it names none."""
    headers: Mapping[str, str]
    body: Json
    """The body's JSON object; None for methods without a body."""
    peer: tuple[str, int] | None = None
    """The other end of the connection that it came by."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    body: Json | bytes
    """JSON, or bytes of the content type in `headers`."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer in pieces, as server-sent events."""

    events: AsyncIterator[Json | str]
    """JSON values, or texts that are sent as they are."""
    headers: Mapping[str, str] = field(default_factory=dict)
    held: AsyncIterator[Any] | None = None
    """What `events` reads from, closed in any case: an iterator that was never begun closes nothing."""


Handler = Callable[[Call], Awaitable[Answer | Stream]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method and path, and what answers it."""

    method: str
    path: str
    """A path that ends in `/` takes every path below it."""
    handler: Handler


SESSION = "x-kapelle-session"
"""Header that names a session."""
_SAFETY = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Application:
    """Routes behind one check; give it to an ASGI server."""

    def __init__(self, binding: Binding, routes: Sequence[Route]) -> None:
        self._binding = binding
        self.routes = tuple(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        assert scope["type"] == "http", "the server is started without lifespan"
        try:
            answer = await self._answer(scope, receive)
        except _Gone:
            return
        except Refusal as refusal:
            answer = Answer(refusal.row(), refusal.status, refusal.headers)
        except Exception as error:
            log_failure(f"A call of {scope['method']} failed.", error)
            failed = Refusal(500, "The service failed; its log says why.", None, "internal_error")
            answer = Answer(failed.row(), failed.status)
        if isinstance(answer, Stream):
            try:
                await _until_gone(_send_events(answer, send), receive)
            except _Gone:
                return
            finally:
                if answer.held is not None:
                    await answer.held.aclose()  # type: ignore[attr-defined]
        else:
            await _send_whole(answer, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Answer | Stream:
        method, headers = scope["method"], headers_of(scope)
        check_call(self._binding, method, headers)
        session, path = _session(scope["path"])
        route, rest = self._route(method, path)
        body = None
        if method == "POST":
            check_body(headers, MOST_BYTES)
            body = _parsed(await _body(receive))
        call = Call(
            rest, headers.get(SESSION) if session is None else session, headers, body, scope.get("client")
        )
        if call.session is not None and not _is_name(call.session):
            raise wrong("A session's name has 1 to 128 letters, digits and any of `._-`.", SESSION)
        return await _until_gone(route.handler(call), receive)

    def _route(self, method: str, path: str) -> tuple[Route, str]:
        found = [
            route
            for route in self.routes
            if path == route.path
            or (route.path.endswith("/") and path.startswith(route.path) and route.path != "/")
        ]
        if not found:
            raise Refusal(404, "There is no such path here.", None, "not_found")
        asked = "GET" if method == "HEAD" else method
        for route in found:
            if route.method == asked:
                return route, path[len(route.path) :]
        allowed = ", ".join(sorted({route.method for route in found}))
        raise Refusal(405, f"This path takes {allowed}.", None, "method_not_allowed", {"allow": allowed})


class _Gone(Exception):
    """The caller went away."""


def headers_of(scope: Scope) -> dict[str, str]:
    """Return a call's headers by name in lower case; one that was sent twice is joined by a comma."""
    headers: dict[str, str] = {}
    for key, value in scope["headers"]:
        name = key.decode("latin-1").lower()
        text = value.decode("latin-1")
        headers[name] = f"{headers[name]}, {text}" if name in headers else text
    return headers


def _session(path: str) -> tuple[str | None, str]:
    """Return the session and the path of `/sessions/NAME/v1/…`, for programs that can be told no more than an address."""
    parts = path.split("/", 3)
    if len(parts) == 4 and parts[:2] == ["", "sessions"] and parts[3].startswith("v1/"):
        return parts[2], f"/{parts[3]}"
    return None, path


def _is_name(session: str) -> bool:
    return 0 < len(session) <= 128 and session.isascii() and all(c.isalnum() or c in "._-" for c in session)


async def _body(receive: Receive) -> bytes:
    read = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Gone
                read += message.get("body", b"")
                if len(read) > MOST_BYTES:
                    raise too_long(MOST_BYTES)
                if not message.get("more_body", False):
                    return bytes(read)
    except TimeoutError:
        raise Refusal(
            408, f"The body was not complete after {BODY_SECONDS:g} s.", None, "body_too_slow"
        ) from None


def _parsed(body: bytes) -> Json:
    from pydantic_core import from_json

    try:
        # Bounded: its numbers have 4,300 digits at most, its brackets a depth of 200; half characters are refused.
        value = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        hint = (
            " JSON has no NaN and no Infinity; send a finite number."
            if b"NaN" in body or b"Infinity" in body
            else ""
        )
        raise Refusal(400, f"The body is no JSON: {error}.{hint}", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise Refusal(400, "The body must be a JSON object.", None, "invalid_json")
    return value


async def _until_gone(work: Awaitable[T], receive: Receive) -> T:
    """Await work; cancel it and raise `_Gone` when the caller goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _Gone
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await each


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_whole(answer: Answer, send: Send) -> None:
    if isinstance(answer.body, bytes):
        body, kind = answer.body, {}
    else:
        body, kind = _dumped(answer.body), {"content-type": "application/json"}
    headers = {**_SAFETY, **kind, **answer.headers, "content-length": str(len(body))}
    await send({"type": "http.response.start", "status": answer.status, "headers": raw(headers)})
    await send({"type": "http.response.body", "body": body})


async def _send_events(stream: Stream, send: Send) -> None:
    headers = {**_SAFETY, "content-type": "text/event-stream", **stream.headers}
    await send({"type": "http.response.start", "status": 200, "headers": raw(headers)})
    async with aclosing(stream.events) as events:  # type: ignore[type-var]
        async for event in _told(events):
            data = event.encode() if isinstance(event, str) else _dumped(event)
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _told(events: AsyncIterator[Json | str]) -> AsyncIterator[Json | str]:
    """Yield events; one that fails ends them with an error that clients read."""
    try:
        async for event in events:
            yield event
    except Refusal as refusal:
        yield refusal.row()
    except Exception as error:
        log_failure("A stream failed.", error)
        yield Refusal(500, "The service failed; its log says why.", None, "internal_error").row()


def _dumped(value: Json) -> bytes:
    # Escaped: a model may write half a character, which UTF-8 does not know.
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers as ASGI sends them."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
