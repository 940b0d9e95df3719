"""Asking a reward server: again where that may help, never a score that it did not give."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kapelle.environments.grading.served_scores import ServedScores

Reply = tuple[int, Any]


class Server:
    """Gives its replies in order, the last one for ever; remembers what it was asked."""

    def __init__(self, *replies: Reply | Exception) -> None:
        self.replies = list(replies)
        self.asked: list[httpx.Request] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return httpx.Response(
            reply[0], content=reply[1] if isinstance(reply[1], bytes) else json.dumps(reply[1])
        )


def scored(score: Any, weights: str = "a") -> Reply:
    return 200, {
        "model": "m",
        "weights": weights,
        "results": [{"status": "scored", "score": score, "logit": 0.0}],
    }


def client(server: Server, retries: int = 3, kept: int = 10) -> ServedScores:
    return ServedScores(
        "http://localhost:1/", "THEIR_TOKEN", 60.0, retries, kept, httpx.MockTransport(server)
    )


async def test_each_content_is_requested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_TOKEN", "secret")
    server = Server(scored(0.25), scored(0.5))
    scores = client(server)
    found = [(await scores.grade("q", text)).score for text in ("a", "b", "a", "b")]
    assert found == [0.25, 0.5, 0.25, 0.5]
    assert [str(each.url) for each in server.asked] == ["http://localhost:1/v1/score"] * 2
    assert json.loads(server.asked[1].content) == {"items": [{"question": "q", "answer": "b"}]}
    assert {each.headers["authorization"] for each in server.asked} == {"Bearer secret"}


@pytest.mark.parametrize(
    "fault", [(429, {}), (503, {}), (504, b""), (500, b"x"), httpx.ConnectError("refused"), httpx.ReadError("gone")]
)  # fmt: skip
async def test_temporary_errors_are_retried_after_longer_pauses(fault: Any, pauses: list[float]) -> None:
    server = Server(fault, fault, fault, scored(0.5))
    assert (await client(server).grade("q", "a")).score == 0.5
    assert len(server.asked) == 4
    assert [0.125 * 2**k <= pause <= 0.25 * 2**k for k, pause in enumerate(pauses)] == [True] * 3


async def test_what_does_not_pass_is_ungraded_in_the_end(pauses: list[float]) -> None:
    server = Server((429, {"error": {"message": "No room."}}))
    grade = await client(server).grade("q", "a")
    assert (grade.status, grade.score, len(server.asked)) == ("ungraded", 0.0, 4)
    assert grade.explanation.endswith(": HTTP 429: No room.")
    pauses.clear()
    await client(server, retries=12).grade("q", "a")
    assert max(pauses) <= 8.0


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((401, {"error": {"message": "The token is wrong."}}), "HTTP 401: The token is wrong."),
        ((400, b"\xff"), "HTTP 400"),
        ((413, [1]), "HTTP 413"),
        ((200, b"no json"), "no JSON instead of an answer"),
        ((200, []), "malformed"),
        ((200, {"results": []}), "malformed"),
        ((200, {"results": [{}, {}]}), "malformed"),
        ((200, {"results": ["x"]}), "no score"),
        ((200, {"results": [{"status": "scored"}]}), "no score"),
        ((200, {"results": [{"score": 1.0}]}), "no score"),
        ((200, {"results": [{"status": "ungraded", "reason": "too long"}]}), ": too long"),
        ((200, {"results": [{"status": "ungraded"}]}), ": None"),
        *((scored(value), "no score") for value in (None, "1", True, -0.1, 1.1, [1])),
        ((200, b'{"results": [{"status": "scored", "score": NaN}]}'), "no score"),
        ((200, b'{"results": [{"status": "scored", "score": 1e999}]}'), "no score"),
        ((200, b"[" * 100_000), "malformed"),
    ],
)
async def test_errors_give_no_score(reply: Reply, said: str, pauses: list[float]) -> None:
    server = Server(reply)
    scores = client(server)
    grade = await scores.grade("q", "a")
    assert grade.status == "ungraded"
    assert said in grade.explanation
    assert len(server.asked) == 1, "another attempt would bring the same"
    server.replies = [scored(0.5)]
    assert (await scores.grade("q", "a")).score == 0.5, "nothing was kept"
