"""Requests to a server with bounds on its answer: bytes, seconds, connections.

The server is somebody else's program. It may answer without end, a byte at a time, or not at all; none of that may
hold an episode for ever or fill this process's memory.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import ssl
import uuid
import weakref
from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, NamedTuple

from kapelle.errors import EpisodeError
from kapelle.runtime.awake import awake_timeout
from kapelle.runtime.characters import cleaned
from kapelle.runtime.deadlines import stand_in_line
from kapelle.runtime.descriptors import room_for
from kapelle.types import Json

if TYPE_CHECKING:
    import httpx

MAX_BYTES = 4 << 20
"""Of one answer. 32,000 tokens with every character escaped take less than 1 MiB."""
MAX_CONNECTIONS = 256
"""Open at once in one event loop; fewer where the system allows fewer files; further requests wait for their turn,
which counts towards no time limit."""

KEY = "Idempotency-Key"
_PRIVATE = re.compile(r"(?<=//)[^/@]*@|[?#].*", re.DOTALL)
"""In an address: a name with its password, and what may be a signature."""
_READING = frozenset({"GET", "HEAD"})
KEPT_S = 2.0
"""Seconds for which an idle connection is kept for another request; servers close theirs after five or more."""


class Answer(NamedTuple):
    """What a server answered."""

    status: int
    body: bytes
    wait: float | None = None
    """Seconds after which it wants to be asked again (`Retry-After`)."""
    location: str = ""
    """Where else it sends whoever asks, at most 200 characters; nobody goes there."""


async def post(
    url: str,
    body: Json,
    headers: Mapping[str, str],
    seconds: float,
    transport: httpx.AsyncBaseTransport | None = None,
) -> tuple[int, bytes]:
    """Post JSON and return the answer's status and body; see `exchange`."""
    answer = await exchange("POST", url, body, {**one_time(), **headers}, seconds, transport)
    return answer.status, answer.body


def one_time() -> dict[str, str]:
    """Return a header by which a server knows one request again, however often it arrives (draft-ietf-httpapi-idempotency-key-header).

    Who asks again sends the same one, so that a server which holds to it neither acts nor charges twice.
    """
    return {KEY: f'"{uuid.uuid4()}"'}


async def exchange(
    method: str,
    url: str,
    body: Json,
    headers: Mapping[str, str],
    seconds: float,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Answer:
    """Send JSON (nothing for None) and return what the server answers; redirects are not followed.

    Where a connection that was open already breaks, the server may have acted or not. Reading is tried once more over a new
    connection, and so is what carries a key of `one_time`; anything else is not sent twice.

    `seconds` is for everything from connecting to the last byte. Raises EpisodeError for an answer that is late,
    longer than `MAX_BYTES` or compressed, and httpx.HTTPError for what the network does. `transport` replaces the
    network in tests.
    """
    pool = _pools.setdefault(asyncio.get_running_loop(), _Pool())
    # A few compressed bytes may stand for very many.
    sent = {**headers, "Accept-Encoding": "identity", "Content-Type": "application/json"}
    # Escaped: a text may hold half a character, which UTF-8 does not know.
    content = None if body is None else json.dumps(body).encode("ascii")
    turn = stand_in_line()
    async with pool.gate:
        turn()
        try:
            async with awake_timeout(seconds):
                return await pool.answer(method, url, content, sent, transport)
        except TimeoutError:
            raise LateError(f"its answer was not complete after {seconds:g} seconds") from None


class _Pool:
    """The connections of one event loop."""

    def __init__(self) -> None:
        self.gate = asyncio.Semaphore(room_for(2, MAX_CONNECTIONS))
        self._kept: httpx.AsyncClient | None = None
        self._end: AsyncGenerator[None] | None = None

    async def answer(
        self,
        method: str,
        url: str,
        content: bytes | None,
        headers: Mapping[str, str],
        transport: httpx.AsyncBaseTransport | None,
    ) -> Answer:
        """Return the answer to one request, over a connection that is open already where there is one."""
        import httpx

        if transport is not None:
            async with _client(transport) as alone:
                return await _answer(
                    alone, alone.build_request(method, url, content=content, headers=headers)
                )
        used = self._kept is not None
        if self._kept is None:
            self._kept = _client()
            self._end = self._closed_with_its_loop(self._kept)
            await anext(self._end)
        request = self._kept.build_request(method, url, content=content, headers=headers)
        try:
            return await _answer(self._kept, request)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            if not used or not (method in _READING or KEY in headers):
                raise
        # The server may have closed a connection in the moment in which it was used again.
        async with _client() as alone:
            return await _answer(alone, request)

    async def _closed_with_its_loop(self, client: httpx.AsyncClient) -> AsyncGenerator[None]:
        """Close a client when its event loop closes its generators, as every loop does at its end."""
        try:
            yield
        finally:
            self._kept = None
            await client.aclose()


_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Pool] = weakref.WeakKeyDictionary()


def _client(transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """Return a client without time limits of its own, which would go on while this process is stopped; it keeps no cookies."""
    import httpx

    return httpx.AsyncClient(
        timeout=httpx.Timeout(None),
        verify=_trusted(),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEPT_S),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        transport=transport,
    )


async def _answer(client: httpx.AsyncClient, request: httpx.Request) -> Answer:
    answer = await client.send(request, stream=True)
    try:
        where = _PRIVATE.sub("", answer.headers.get("location", "")[:2000])
        return Answer(
            answer.status_code,
            await _body(answer),
            _wait(answer.headers.get("retry-after", "")),
            cleaned(where[:200]),
        )
    finally:
        await answer.aclose()


def _wait(said: str) -> float | None:
    """Return the seconds of a `Retry-After`, which are a number or the date until then (RFC 9110, 10.2.3); None for neither."""
    try:
        if said.strip().isdecimal():
            return float(said)
        date = parsedate_to_datetime(said)
        return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Whom connections trust: read once, because a client of its own for each request would read it each time."""
    import httpx

    return httpx.create_ssl_context()


class LateError(EpisodeError):
    """An answer that was not complete in time; another attempt may get one."""


async def _body(answer: httpx.Response) -> bytes:
    packed = answer.headers.get("content-encoding", "identity")
    if packed != "identity":
        raise EpisodeError(f"its answer is compressed ({packed[:40]}), which was not asked for")
    read = bytearray()
    async for piece in answer.aiter_bytes():
        read += piece
        if len(read) > MAX_BYTES:
            raise EpisodeError(f"its answer has more than {MAX_BYTES:,} bytes")
    return bytes(read)
