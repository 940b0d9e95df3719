"""Asking a server again where that may help: after longer and longer pauses, or as long as it asks to wait.

A busy server says so with HTTP 429 or 503, and often with `Retry-After`. Who asks again at once makes it busier, and who
asks again together with others comes together with them once more. So pauses double and are drawn at random.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kapelle.errors import EpisodeError
from kapelle.runtime.http import Answer, LateError, exchange, one_time
from kapelle.types import Json

if TYPE_CHECKING:
    import httpx
    import tenacity

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
"""Seconds between the first two attempts, and the most between any two that the server does not ask for."""
MOST_WAITING = 60.0
"""Most seconds of all pauses together; a server that asks for more has not answered."""
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses that may be others the next time."""
_jitter = random.Random()  # when to ask again; no result depends on it


class Unanswered(EpisodeError):
    """A server that gave no answer, or one that is none."""

    def __init__(self, reason: str, *, passing: bool, wait: float | None = None) -> None:
        super().__init__(reason)
        self.passing = passing
        """Whether another attempt may bring one."""
        self.wait = wait
        """Seconds after which the server wants to be asked again."""


async def post_again(
    url: str,
    body: Json,
    headers: Mapping[str, str],
    seconds: float,
    retries: int,
    transport: httpx.AsyncBaseTransport | None = None,
) -> bytes:
    """Post JSON and return the body of an answer with status 200, which is JSON without an error; Unanswered with the last reason where none came.

    All attempts carry one `Idempotency-Key`. `seconds` bounds one attempt, `retries` how many may follow the first one, and `MOST_WAITING` the pauses between them.
    """
    import tenacity

    last = tenacity.stop_after_attempt(1 + retries)
    attempts = tenacity.AsyncRetrying(
        sleep=asyncio.sleep,
        wait=_pause,
        stop=lambda state: last(state) or state.idle_for + state.upcoming_sleep > MOST_WAITING,
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, Unanswered) and error.passing),
        reraise=True,
    )
    sent = {**one_time(), **headers}
    answer: bytes = await attempts(_attempt, url, body, sent, seconds, transport)
    return answer


def _pause(state: tenacity.RetryCallState) -> float:
    """Return the seconds until the next attempt."""
    own = min(FIRST_PAUSE * 2.0 ** min(state.attempt_number - 1, 30), LONGEST_PAUSE) * _jitter.uniform(
        0.5, 1.0
    )
    error = state.outcome.exception() if state.outcome is not None else None
    asked = error.wait if isinstance(error, Unanswered) else None
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
        raise Unanswered(str(error), passing=True) from None
    except EpisodeError as error:
        raise Unanswered(str(error), passing=False) from None
    except httpx.HTTPError as error:
        raise Unanswered(f"{type(error).__name__}: {error}", passing=True) from None
    key = headers.get("Authorization", "").removeprefix("Bearer ")
    if answer.status != 200:
        raise _refusal(answer, key)
    _check_said(answer.body, key)
    return answer.body


def _check_said(body: bytes, key: str) -> None:
    """Refuse what comes with status 200 and is no answer: an error, a proxy's page, the beginning of one."""
    try:
        said = json.loads(body)
    except ValueError:
        begins = body.lstrip()[:1]
        what = {b"<": "a web page", b"{": "the beginning of one", b"": "nothing"}.get(begins)
        raise Unanswered(
            f"HTTP 200, and {what or 'no JSON'} instead of an answer", passing=what is not None
        ) from None
    except RecursionError:
        return  # whoever wants to read it says so
    error = said.get("error") if isinstance(said, dict) else None
    if error:
        status = error.get("code") if isinstance(error, dict) else None
        reason = f"HTTP 200 with an error inside{said_in(body, key)}"
        raise Unanswered(reason, passing=isinstance(status, int) and status in PASSING)


def _refusal(answer: Answer, key: str) -> Unanswered:
    waits = "" if answer.wait is None else f", to be asked again in {answer.wait:,.0f} s"
    moved = f", which sends on to {answer.location}" if answer.location and 300 <= answer.status < 400 else ""
    reason = f"HTTP {answer.status}{moved}{waits}{said_in(answer.body, key)}"
    return Unanswered(reason, passing=answer.status in PASSING, wait=answer.wait)


def said_in(body: bytes, key: str = "") -> str:
    """Return what a server says is wrong, bounded, in one line and without the key; empty where it says nothing in OpenAI's form."""
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    whole = " ".join(said.split())
    return f": {whole.replace(key, '…') if key else whole}"[:300]  # cut last: half a key is one, too
