"""Requests to a server with bounds on its answer: bytes, seconds, connections.

The server is somebody else's program. It may answer without end, a byte at a time, or not at all; none of that may
hold an episode for ever or fill this process's memory.
"""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kapelle.errors import EpisodeError
from kapelle.runtime.awake import awake_timeout
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

_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def post(
    url: str,
    body: Json,
    headers: Mapping[str, str],
    seconds: float,
    transport: httpx.AsyncBaseTransport | None = None,
) -> tuple[int, bytes]:
    """Post JSON and return the answer's status and body.

    `seconds` is for everything from connecting to the last byte. Raises EpisodeError for an answer that is late,
    longer than `MAX_BYTES` or compressed, and httpx.HTTPError for what the network does. `transport` replaces the
    network in tests.
    """
    import httpx

    gate = _gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(room_for(2, MAX_CONNECTIONS)))
    # A few compressed bytes may stand for very many.
    sent = {**headers, "Accept-Encoding": "identity", "Content-Type": "application/json"}
    # `awake_timeout` is the limit: httpx's own would go on while this process is stopped.
    no_limits = httpx.Timeout(None)
    # Escaped: a text may hold half a character, which UTF-8 does not know.
    content = json.dumps(body).encode("ascii")
    turn = stand_in_line()
    async with gate:
        turn()
        try:
            async with (
                awake_timeout(seconds),
                httpx.AsyncClient(timeout=no_limits, verify=_trusted(), transport=transport) as client,
                client.stream("POST", url, content=content, headers=sent) as answer,
            ):
                return answer.status_code, await _body(answer)
        except TimeoutError:
            raise LateError(f"its answer was not complete after {seconds:g} seconds") from None


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
