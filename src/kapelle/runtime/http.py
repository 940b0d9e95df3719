"""Send HTTP requests with retries and with limits on the size of the response, the time and the number of connections.

A server may send an endless response, send one byte at a time, or not respond at all. None of this may block an episode forever or
fill the memory.
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
"""Maximum number of bytes of a response. A response with 32,000 tokens takes less than 1 MiB, even if all characters are escaped."""
MAX_CONNECTIONS = 256
"""Maximum number of open connections per event loop. If the system allows fewer open files, the maximum is lower. Further requests wait
in a queue, and this time does not count towards their deadline."""

KEY = "Idempotency-Key"
_PRIVATE = re.compile(r"(?<=//)[^/@]*@|[?#].*", re.DOTALL)
"""Regular expression of the secret parts of a URL: user, password, query and fragment."""
_READING = frozenset({"GET", "HEAD"})
KEPT_S = 2.0
"""Time in seconds for which an idle connection is kept open. Servers close idle connections after five seconds or more."""


class Answer(NamedTuple):
    """The response of a server."""

    status: int
    body: bytes
    wait: float | None = None
    """Time in seconds until a retry, from the header `Retry-After`."""
    location: str = ""
    """Target of a redirect, at most 200 characters. Redirects are not followed."""


async def post(
    url: str,
    body: Json,
    headers: Mapping[str, str],
    seconds: float,
    transport: httpx.AsyncBaseTransport | None = None,
) -> tuple[int, bytes]:
    """Post JSON, and return the status and the body of the response; see `exchange`."""
    answer = await exchange("POST", url, body, {**idempotency_key(), **headers}, seconds, transport)
    return answer.status, answer.body


def idempotency_key() -> dict[str, str]:
    """Return a header that lets a server recognise a repeated request (draft-ietf-httpapi-idempotency-key-header)."""
    return {KEY: f'"{uuid.uuid4()}"'}


async def exchange(
    method: str,
    url: str,
    body: Json,
    headers: Mapping[str, str],
    seconds: float,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Answer:
    """Send a request with a JSON body (no body for None), and return the response.

    Redirects are not followed. If a connection that was kept open breaks, it is unknown whether the server has processed the request.
    A request that only reads data, or that has an `idempotency_key`, is therefore sent again over a new connection.

    The argument `seconds` limits the total time from connecting to the last byte. Raises EpisodeError if the response is late, longer
    than `MAX_BYTES` or compressed, and httpx.HTTPError if there is a network error. The argument `transport` replaces the network in
    tests.
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
    """The open connections of one event loop."""

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
        """Send one request and return the response, over an open connection if there is one."""
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
        """Close a client when its event loop closes its asynchronous generators, as every event loop does at its end."""
        try:
            yield
        finally:
            self._kept = None
            await client.aclose()


_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Pool] = weakref.WeakKeyDictionary()


def _client(transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """Return a client without cookies and without timeouts.

    Timeouts would continue to run while this process is stopped.
    """
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
    """Return the number of seconds in a `Retry-After` header (RFC 9110, section 10.2.3).

    The value can be a number or a date. The result is None if the value is neither a number nor a date.
    """
    try:
        if header.strip().isdecimal():
            return float(header)
        date = parsedate_to_datetime(header)
        return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return an SSL context with the trusted certificate authorities, which are loaded only once."""
    import httpx

    return httpx.create_ssl_context()


class LateError(EpisodeError):
    """The response was not complete in time. A retry may succeed."""


# -------- Retries: pauses double, with jitter so that clients do not return all together, or last as long as `Retry-After`.

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
"""Time in seconds between the first two attempts, and maximum time in seconds between two attempts without `Retry-After`."""
MOST_WAITING = 60.0
"""Maximum total time in seconds of all pauses between attempts."""
TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP status codes of temporary failures."""
REFUSED = frozenset({400, 413, 415, 422})
"""HTTP status codes with which a server refuses the content of a request. Another request may succeed."""
_jitter = random.Random()  # no result depends on it


class NoAnswer(EpisodeError):
    """There was no response, or the response was invalid."""

    def __init__(
        self,
        reason: str,
        *,
        passing: bool,
        wait: float | None = None,
        parameter: str | None = None,
        refused: bool = False,
    ) -> None:
        super().__init__(reason)
        self.refused = refused
        """Whether the server refused the content of the request."""
        self.parameter = parameter
        """The name of the parameter that the server does not support, or None if there is no such parameter."""
        self.passing = passing
        """Whether a retry may succeed."""
        self.wait = wait
        """Time in seconds until a retry, as requested by the server."""


async def post_with_retries(
    url: str,
    body: Json,
    headers: Mapping[str, str],
    seconds: float,
    retries: int,
    transport: httpx.AsyncBaseTransport | None = None,
) -> bytes:
    """Post JSON with retries, and return the body of a response with status 200 that contains JSON without an error.

    Raises NoAnswer with the reason of the last failure. All attempts have the same `Idempotency-Key`. The argument `seconds` is the
    time limit of one attempt, and `retries` is the maximum number of attempts after the first one. The total time of the pauses is
    limited by `MOST_WAITING`.
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
    """Return the time in seconds until the next attempt."""
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
        passing = answer.status in TRANSIENT
        refused = answer.status in REFUSED
        raise NoAnswer(
            reason, passing=passing, wait=answer.wait, parameter=_unsupported(answer.body), refused=refused
        )
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


def _unsupported(body: bytes) -> str | None:
    """Return the name of the parameter that a response in the format of the OpenAI API does not support, or None."""
    try:
        error = json.loads(body)["error"]
        return (
            str(error["param"]) if error["code"] in ("unsupported_parameter", "unsupported_value") else None
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def error_message(body: bytes, key: str = "") -> str:
    """Return the error message in a response in the format of the OpenAI API, as one line of limited length without the API key.

    The result is empty if the response has another format.
    """
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    whole = " ".join(message.split())
    return f": {whole.replace(key, '…') if key else whole}"[:300]  # cut last: a part of a key is secret too
