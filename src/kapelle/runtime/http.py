"""Requests to a server with limits on its answer (bytes, seconds, connections), and retries.

The server may answer without end, a byte at a time, or not at all. That must neither block an episode forever nor fill the memory.
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
"""Maximum bytes of one answer; 32,000 tokens with all characters escaped take less than 1 MiB."""
MAX_CONNECTIONS = 256
"""Maximum open connections of one event loop; fewer if the system allows fewer files. Further requests wait in a queue, without counting
towards a deadline."""

KEY = "Idempotency-Key"
_PRIVATE = re.compile(r"(?<=//)[^/@]*@|[?#].*", re.DOTALL)
"""Secret parts of an address: user, password, query and fragment."""
_READING = frozenset({"GET", "HEAD"})
KEPT_S = 2.0
"""Seconds for which an idle connection is kept; servers close theirs after five or more."""


class Answer(NamedTuple):
    """The answer of a server."""

    status: int
    body: bytes
    wait: float | None = None
    """Seconds until a retry (`Retry-After`)."""
    location: str = ""
    """Target of a redirect, at most 200 characters; redirects are not followed."""


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
    """Return a header by which a server recognises a repeated request (draft-ietf-httpapi-idempotency-key-header)."""
    return {KEY: f'"{uuid.uuid4()}"'}


async def exchange(
    method: str,
    url: str,
    body: Json,
    headers: Mapping[str, str],
    seconds: float,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Answer:
    """Send JSON (nothing for None) and return the answer; redirects are not followed.

    If a kept connection breaks, the server may have acted or not. Requests that only read, or that have an `idempotency_key`, are
    sent once more over a new connection.

    `seconds` limits everything from connecting to the last byte. Raises EpisodeError for an answer that is late, longer than
    `MAX_BYTES` or compressed, and httpx.HTTPError for network errors. `transport` replaces the network in tests.
    """
    pool = _pools.setdefault(asyncio.get_running_loop(), _Pool())
    # Not compressed, because a few compressed bytes may unpack to many.
    sent = {**headers, "Accept-Encoding": "identity", "Content-Type": "application/json"}
    # ASCII escapes, because UTF-8 cannot encode a lone surrogate.
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
        """Return the answer to one request, over an open connection if there is one."""
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
        # The server may have closed the kept connection just now.
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
    """Return a client without cookies, and without timeouts, which would continue while this process is stopped."""
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
            raise EpisodeError(f"its answer is compressed ({packed[:40]}), which was not requested")
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


def _wait(header: str) -> float | None:
    """Return the seconds of a `Retry-After`, a number or a date (RFC 9110, 10.2.3); None for neither."""
    try:
        if header.strip().isdecimal():
            return float(header)
        date = parsedate_to_datetime(header)
        return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return the trusted certificate authorities, which are read only once."""
    import httpx

    return httpx.create_ssl_context()


class LateError(EpisodeError):
    """An answer that was not complete in time; a retry may succeed."""


# -------- Retries: pauses double, with jitter so that clients do not return all together, or last as long as `Retry-After`.

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
"""Seconds between the first two attempts, and maximum seconds between two attempts without `Retry-After`."""
MOST_WAITING = 60.0
"""Maximum seconds of all pauses together."""
TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses of temporary failures."""
_jitter = random.Random()  # no result depends on it


class NoAnswer(EpisodeError):
    """No answer, or an invalid one."""

    def __init__(self, reason: str, *, passing: bool, wait: float | None = None) -> None:
        super().__init__(reason)
        self.passing = passing
        """Whether a retry may succeed."""
        self.wait = wait
        """Seconds until a retry, as the server requests."""


async def post_with_retries(
    url: str,
    body: Json,
    headers: Mapping[str, str],
    seconds: float,
    retries: int,
    transport: httpx.AsyncBaseTransport | None = None,
) -> bytes:
    """Post JSON and return the body of an answer with status 200: JSON without an error. Raises NoAnswer with the last reason.

    All attempts have the same `Idempotency-Key`. `seconds` limits one attempt, `retries` the attempts after the first one, and
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
    doubled = min(FIRST_PAUSE * 2.0 ** min(state.attempt_number - 1, 30), LONGEST_PAUSE)
    error = state.outcome.exception() if state.outcome is not None else None
    requested = error.wait if isinstance(error, NoAnswer) else None
    return doubled * _jitter.uniform(0.5, 1.0) + (requested or 0.0)


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
        waits = "" if answer.wait is None else f", retry after {answer.wait:,.0f} s"
        redirects = answer.location and 300 <= answer.status < 400
        moved = f", a redirect to {answer.location}" if redirects else ""
        reason = f"HTTP {answer.status}{moved}{waits}{error_message(answer.body, key)}"
        raise NoAnswer(reason, passing=answer.status in TRANSIENT, wait=answer.wait)
    # A body with status 200 may be an error, a proxy's page, or truncated.
    try:
        content = json.loads(answer.body)
    except ValueError:
        begins = answer.body.lstrip()[:1]
        what = {b"<": "a web page", b"{": "the beginning of one", b"": "an empty body"}.get(begins)
        raise NoAnswer(
            f"HTTP 200 with {what or 'no JSON'} instead of an answer", passing=what is not None
        ) from None
    except RecursionError:
        return answer.body  # the caller reports this error
    inside = content.get("error") if isinstance(content, dict) else None
    if inside:
        status = inside.get("code") if isinstance(inside, dict) else None
        reason = f"HTTP 200 with an error inside{error_message(answer.body, key)}"
        raise NoAnswer(reason, passing=isinstance(status, int) and status in TRANSIENT)
    return answer.body


def error_message(body: bytes, key: str = "") -> str:
    """Return the message of an error in OpenAI's form, as one line of limited length without the key; empty for other bodies."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    whole = " ".join(message.split())
    return f": {whole.replace(key, '…') if key else whole}"[:300]  # cut last: a part of a key is secret too
