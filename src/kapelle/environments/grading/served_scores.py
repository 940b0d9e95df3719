"""Scores of answers by a reward server, such as `kapelle serve reward`; docs/reward_server.md has its contract."""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from typing import TYPE_CHECKING

from kapelle.environments.grading.verdict import SHOWN, Grade, ungraded
from kapelle.runtime.credentials import bearer
from kapelle.runtime.http import NoAnswer, post_with_retries

if TYPE_CHECKING:
    import httpx

KEPT = 65_536
"""Scores that are kept, by the content of question and answer."""


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

    async def grade(self, question: str, text: str) -> Grade:
        """Return the score of a text as an answer; `ungraded` where the server has none or does not answer."""
        key = hashlib.sha256(json.dumps([question, text]).encode()).digest()
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return known
        body = {"items": [{"question": question, "answer": text}]}
        headers = bearer(self._token_env, self._url)
        nothing = f"The reward server at {self._url} gave no score"
        try:
            answer = await post_with_retries(
                self._url, body, headers, self._seconds, self._retries, self._transport
            )
        except NoAnswer as error:
            return ungraded(text[:SHOWN], f"{nothing}: {error}")
        try:
            said = dict(json.loads(answer))
            [result] = said["results"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return ungraded(text[:SHOWN], f"{nothing}: it answers in another form than a reward server's")
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
        grade = Grade(float(score), text[:SHOWN], f"The reward server's score is {score:.3f}.")
        # Scores of another model than before are no longer those that the server gives.
        if said.get("weights") != self._weights:
            self._kept.clear()
            self._weights = said.get("weights")
        self._kept[key] = grade
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return grade
