"""Request scores of answers from a reward server, such as `kapelle serve reward`; docs/reward_server.md describes the API."""

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
"""Maximum number of cached scores. The cache key is the content of the question and the answer."""


class ServedScores:
    """A client that requests scores from a reward server, retries failed requests and caches scores by content."""

    def __init__(
        self,
        address: str,
        token_env: str,
        seconds: float,
        retries: int,
        kept: int = KEPT,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Set the address of the server, the timeout of a request in `seconds`, the number of `retries` and the cache size `kept`.

        `token_env` is the name of the environment variable that contains the token. `transport` replaces the network in tests.
        """
        self._url = f"{address.rstrip('/')}/v1/score"
        self._token_env, self._seconds, self._retries, self._most = token_env, seconds, retries, kept
        self._transport = transport
        self._kept: OrderedDict[bytes, Grade] = OrderedDict()
        self._weights: object = None
        """The hash of the weights that produced the cached scores."""

    async def grade(self, question: str, text: str) -> Grade:
        """Return the score of `text` as an answer to `question`; the verdict is `ungraded` if the server returns no score."""
        key = hashlib.sha256(json.dumps([question, text]).encode()).digest()
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return known
        body = {"items": [{"question": question, "answer": text}]}
        headers = bearer(self._token_env, self._url)
        failure = f"The reward server at {self._url} returned no score"
        try:
            answer = await post_with_retries(
                self._url, body, headers, self._seconds, self._retries, self._transport
            )
        except NoAnswer as error:
            return ungraded(text[:SHOWN], f"{failure}: {error}")
        try:
            reply = dict(json.loads(answer))
            [result] = reply["results"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return ungraded(text[:SHOWN], f"{failure}: its reply is malformed")
        status = result.get("status") if isinstance(result, dict) else None
        if status == "ungraded":
            return ungraded(
                text[:SHOWN], f"The reward server gave this reason: {str(result.get('reason'))[:300]}"
            )
        score = result.get("score") if status == "scored" else None
        if (
            isinstance(score, bool)
            or not isinstance(score, int | float)
            or not (math.isfinite(score) and 0 <= score <= 1)
        ):
            return ungraded(text[:SHOWN], "The reward server's response contains no score between 0 and 1.")
        grade = Grade(float(score), text[:SHOWN], f"The reward server's score is {score:.3f}.")
        # A new model on the server invalidates the cached scores.
        if reply.get("weights") != self._weights:
            self._kept.clear()
            self._weights = reply.get("weights")
        self._kept[key] = grade
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return grade
