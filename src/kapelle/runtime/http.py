"""Requests to a server with bounds on its answer (bytes, seconds, connections), and retries where they may help.

The server is another program. It may answer without end, a byte at a time, or not at all; that must neither hold an
episode for ever nor fill this process's memory.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
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
from kapelle.runtime.characters import cleaned
from kapelle.runtime.clock import suspend_aware_timeout
from kapelle.runtime.deadlines import pause_deadline
from kapelle.runtime.machine import most_open
from kapelle.types import Json

if TYPE_CHECKING:
    import httpx
    import tenacity


MAX_BYTES = 4 << 20
"""Most bytes of one answer. 32,000 tokens with every character escaped take less than 1 MiB."""
MAX_CONNECTIONS = 256
"""Connections that may be open at once in one event loop, fewer where the system allows fewer files. Further requests queue;
the time in the queue counts towards no deadline."""

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
    """The address that it redirects to, at most 200 characters; redirects are not followed."""


async def post(
    url: str,
    body: Json,
    headers: Mapping[str, str],
    seconds: float,
    transport: httpx.AsyncBaseTransport | None = None,
) -> tuple[int, bytes]:
    """Post JSON and return the answer's status and body; see `exchange`."""
    answer = await exchange("POST", url, body, {**idempotency_key(), **headers}, seconds, transport)
    return answer.status, answer.body


def idempotency_key() -> dict[str, str]:
    """Return a header by which a server recognises a request that is sent again (draft-ietf-httpapi-idempotency-key-header).

    Every attempt carries the same one, so that a server which heeds it neither acts nor charges twice.
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

    Where a kept connection breaks, the server may have acted or not. A request that only reads, or that carries a key of
    `idempotency_key`, is sent once more over a new connection; others are not sent twice.

    `seconds` bounds everything from connecting to the last byte. Raises EpisodeError for an answer that is late,
    longer than `MAX_BYTES` or compressed, and httpx.HTTPError for what the network does. `transport` replaces the
    network in tests.
    """
    pool = _pools.setdefault(asyncio.get_running_loop(), _Pool())
    # Not compressed, because a few compressed bytes may unpack to very many.
    sent = {**headers, "Accept-Encoding": "identity", "Content-Type": "application/json"}
    # ASCII escapes, because a text may hold a lone surrogate, which UTF-8 cannot encode.
    content = None if body is None else json.dumps(body).encode("ascii")
    turn = pause_deadline()
    async with pool.gate:
        turn()
        try:
            async with suspend_aware_timeout(seconds):
                return await pool.answer(method, url, content, sent, transport)
        except TimeoutError:
            raise LateError(f"its answer was not complete after {seconds:g} seconds") from None


class _Pool:
    """The connections of one event loop."""

    def __init__(self) -> None:
        self.gate = asyncio.Semaphore(most_open(2, MAX_CONNECTIONS))
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
    """Return a client without cookies, and without timeouts of its own, which would run on while this process is stopped."""
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
        packed = answer.headers.get("content-encoding", "identity")
        if packed != "identity":
            raise EpisodeError(f"its answer is compressed ({packed[:40]}), which was not asked for")
        body = bytearray()
        async for piece in answer.aiter_bytes():
            body += piece
            if len(body) > MAX_BYTES:
                raise EpisodeError(f"its answer has more than {MAX_BYTES:,} bytes")
        where = _PRIVATE.sub("", answer.headers.get("location", "")[:2000])
        wait = _wait(answer.headers.get("retry-after", ""))
        return Answer(answer.status_code, bytes(body), wait, cleaned(where[:200]))
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
    """Return the certificate authorities that connections trust; read once, and not for each client."""
    import httpx

    return httpx.create_ssl_context()


class LateError(EpisodeError):
    """An answer that was not complete in time; another attempt may get one."""


# -------- Retries: after longer and longer pauses, or as long as the server asks to wait.
#
# A busy server says so with HTTP 429 or 503, and often with `Retry-After`. Clients that ask again at once make it busier, and
# clients that wait equally long come back all together. So pauses double, with jitter.

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
"""Seconds between the first two attempts, and the most between any two that the server does not ask for."""
MOST_WAITING = 60.0
"""Most seconds of all pauses together; a server that asks for more has not answered."""
TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses of failures that may pass."""
_jitter = random.Random()  # when to ask again; no result depends on it


class NoAnswer(EpisodeError):
    """A server that gave no answer, or something that is no answer."""

    def __init__(self, reason: str, *, passing: bool, wait: float | None = None) -> None:
        super().__init__(reason)
        self.passing = passing
        """Whether another attempt may bring one."""
        self.wait = wait
        """Seconds after which the server wants to be asked again."""


async def post_with_retries(
    url: str,
    body: Json,
    headers: Mapping[str, str],
    seconds: float,
    retries: int,
    transport: httpx.AsyncBaseTransport | None = None,
) -> bytes:
    """Post JSON and return the body of an answer with status 200: JSON without an error. Raises NoAnswer with the last reason.

    All attempts carry one `Idempotency-Key`. `seconds` bounds one attempt, `retries` the attempts after the first one, and
    `MOST_WAITING` the pauses between them.
    """
    import tenacity

    last = tenacity.stop_after_attempt(1 + retries)
    attempts = tenacity.AsyncRetrying(
        sleep=asyncio.sleep,
        wait=_pause,
        stop=lambda state: last(state) or state.idle_for + state.upcoming_sleep > MOST_WAITING,
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, NoAnswer) and error.passing),
        reraise=True,
    )
    sent = {**idempotency_key(), **headers}
    answer: bytes = await attempts(_attempt, url, body, sent, seconds, transport)
    return answer


def _pause(state: tenacity.RetryCallState) -> float:
    """Return the seconds until the next attempt."""
    own = min(FIRST_PAUSE * 2.0 ** min(state.attempt_number - 1, 30), LONGEST_PAUSE) * _jitter.uniform(
        0.5, 1.0
    )
    error = state.outcome.exception() if state.outcome is not None else None
    asked = error.wait if isinstance(error, NoAnswer) else None
    return own if asked is None else asked + own


async def _attempt(
    url: str,
    body: Json,
    headers: Mapping[str, str],
    seconds: float,
    transport: httpx.AsyncBaseTransport | None,
) -> bytes:
    import httpx

    try:
        answer = await exchange("POST", url, body, headers, seconds, transport)
    except LateError as error:
        raise NoAnswer(str(error), passing=True) from None
    except EpisodeError as error:
        raise NoAnswer(str(error), passing=False) from None
    except httpx.HTTPError as error:
        raise NoAnswer(f"{type(error).__name__}: {error}", passing=True) from None
    key = headers.get("Authorization", "").removeprefix("Bearer ")
    if answer.status != 200:
        waits = "" if answer.wait is None else f", to be asked again in {answer.wait:,.0f} s"
        redirects = answer.location and 300 <= answer.status < 400
        moved = f", which sends on to {answer.location}" if redirects else ""
        reason = f"HTTP {answer.status}{moved}{waits}{error_message(answer.body, key)}"
        raise NoAnswer(reason, passing=answer.status in TRANSIENT, wait=answer.wait)
    # With status 200 something else may come: an error, a proxy's page, a body that was cut off.
    try:
        said = json.loads(answer.body)
    except ValueError:
        begins = answer.body.lstrip()[:1]
        what = {b"<": "a web page", b"{": "the beginning of one", b"": "nothing"}.get(begins)
        raise NoAnswer(
            f"HTTP 200, and {what or 'no JSON'} instead of an answer", passing=what is not None
        ) from None
    except RecursionError:
        return answer.body  # the caller, which reads it too, reports that
    inside = said.get("error") if isinstance(said, dict) else None
    if inside:
        status = inside.get("code") if isinstance(inside, dict) else None
        reason = f"HTTP 200 with an error inside{error_message(answer.body, key)}"
        raise NoAnswer(reason, passing=isinstance(status, int) and status in TRANSIENT)
    return answer.body


def error_message(body: bytes, key: str = "") -> str:
    """Return the message of an error in OpenAI's form, in one line of bounded length, without the key; empty for other bodies."""
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    whole = " ".join(said.split())
    return f": {whole.replace(key, '…') if key else whole}"[:300]  # cut last: half a key is one, too
