"""Scores of answers by a reward server, such as `kapelle serve reward`; docs/reward_server.md has its contract."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import random
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from kapelle.errors import EpisodeError
from kapelle.grading.verdict import SHOWN, Grade, ungraded
from kapelle.runtime.http import LateError, post

if TYPE_CHECKING:
    import httpx

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
"""Seconds between the first two attempts, and the most between any two; they double in between."""
KEPT = 65_536
"""Scores that are kept, by the content of question and answer."""
PASSING = {408, 429, 500, 502, 503, 504}
"""Statuses that may be others the next time."""


class Unanswered(Exception):
    """An attempt that brought no score."""

    def __init__(self, reason: str, *, passing: bool) -> None:
        super().__init__(reason)
        self.passing = passing
        """Whether another attempt may bring one."""


class ServedScores:
    """Asks a reward server, again where that may help, and keeps what it said by content."""

    def __init__(
        self,
        address: str,
        token_env: str,
        seconds: float,
        retries: int,
        kept: int = KEPT,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Take the server's address and its limits: `seconds` of one attempt, further attempts, and how many scores are kept.

        `token_env` names the environment variable with the token. `transport` replaces the network in tests.
        """
        self._url = f"{address.rstrip('/')}/v1/score"
        self._token_env, self._seconds, self._retries, self._most = token_env, seconds, retries, kept
        self._transport = transport
        self._kept: OrderedDict[bytes, Grade] = OrderedDict()
        self._weights: object = None
        """Of the model that gave the scores that are kept."""
        self._jitter = random.Random()  # when to ask again; no result depends on it

    async def grade(self, question: str, text: str) -> Grade:
        """Return the score of a text as an answer; `ungraded` where the server has none or does not answer."""
        key = hashlib.sha256(json.dumps([question, text]).encode()).digest()
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return known
        try:
            said = await self._asked({"items": [{"question": question, "answer": text}]})
        except Unanswered as error:
            return ungraded(text[:SHOWN], f"The reward server at {self._url} gave no score: {error}")
        grade = _grade(said, text)
        if grade.status == "graded":
            self._keep(key, grade, said.get("weights"))
        return grade

    def _keep(self, key: bytes, grade: Grade, weights: object) -> None:
        if weights != self._weights:  # another model than before
            self._kept.clear()
            self._weights = weights
        self._kept[key] = grade
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    async def _asked(self, body: dict[str, Any]) -> dict[str, Any]:
        pause = FIRST_PAUSE
        for left in range(self._retries, -1, -1):
            try:
                return await self._attempt(body)
            except Unanswered as error:
                if not (error.passing and left):
                    raise
            # Callers that were refused together do not come again together.
            await asyncio.sleep(pause * self._jitter.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, body: dict[str, Any]) -> dict[str, Any]:
        import httpx

        token = os.environ.get(self._token_env, "")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            status, answer = await post(self._url, body, headers, self._seconds, self._transport)
        except LateError as error:
            raise Unanswered(str(error), passing=True) from None
        except EpisodeError as error:
            raise Unanswered(str(error), passing=False) from None
        except httpx.HTTPError as error:
            raise Unanswered(f"{type(error).__name__}: {error}", passing=True) from None
        if status != 200:
            raise Unanswered(f"HTTP {status}{_message(answer)}", passing=status in PASSING)
        try:
            said = json.loads(answer)
            assert len(said["results"]) == 1
        except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
            raise Unanswered("it answers in another form than a reward server's", passing=False) from None
        return dict(said)


def _message(answer: bytes) -> str:
    """Return what a server says is wrong, bounded; empty where it says nothing in the known form."""
    try:
        return f": {json.loads(answer)['error']['message']}"[:300]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _grade(said: dict[str, Any], text: str) -> Grade:
    result = said["results"][0]
    status = result.get("status") if isinstance(result, dict) else None
    if status == "ungraded":
        return ungraded(text[:SHOWN], f"The reward server says: {str(result.get('reason'))[:300]}")
    score = result.get("score") if status == "scored" else None
    if (
        isinstance(score, bool)
        or not isinstance(score, int | float)
        or not (math.isfinite(score) and 0 <= score <= 1)
    ):
        return ungraded(text[:SHOWN], "The reward server's answer holds no score from 0 to 1.")
    return Grade(float(score), text[:SHOWN], f"The reward server's score is {score:.3f}.")
