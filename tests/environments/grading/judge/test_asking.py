"""Whom a judge asks: the same conversation once, in memory and in a file, within a budget."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kapelle.environments.grading.asking import Asking, EndpointJudge
from kapelle.errors import EpisodeError, TrainingHalted
from kapelle.types import Message


def judge(**more: object) -> EndpointJudge:
    return EndpointJudge.model_validate({"endpoint": "http://localhost:1/v1", "model": "judge", **more})


class Slow:
    """Answers a while later, and keeps how many wait at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.now = self.most = 0

    async def __call__(self, messages: Sequence[Message]) -> str:
        self.asked.append(messages[0].content)
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(5):
            await asyncio.sleep(0)
        self.now -= 1
        return f"reply to {messages[0].content}"


def said(text: str) -> list[Message]:
    return [Message("user", text)]


async def test_the_same_question_at_once_and_later_is_requested_once() -> None:
    slow = Slow()
    asking = Asking(judge(), slow)
    replies = await asyncio.gather(*(asking(said(text)) for text in "aabab"))
    assert replies == [f"reply to {text}" for text in "aabab"]
    assert sorted(slow.asked) == ["a", "b"]
    assert await asking(said("a")) == "reply to a"
    assert (asking.calls, asking.cached) == (2, 4)


async def test_a_reply_is_reloaded_from_the_file(tmp_path: Path) -> None:
    file, slow = tmp_path / "kept" / "verdicts.jsonl", Slow()
    await Asking(judge(cache=str(file)), slow)(said("a"))
    again = Asking(judge(cache=str(file)), slow)
    assert await again(said("a")) == "reply to a"
    assert (again.calls, again.cached, slow.asked) == (0, 1, ["a"])
    # Another model, or replies of another length, are other verdicts; another address is not.
    for other, calls in (
        ({"model": "other"}, 1),
        ({"max_tokens": 9}, 1),
        ({"endpoint": "http://localhost:2/v1"}, 0),
    ):
        asking = Asking(judge(cache=str(file), **other), slow)
        await asking(said("a"))
        assert asking.calls == calls


async def test_damaged_lines_are_skipped_with_one_warning(tmp_path: Path) -> None:
    file, slow = tmp_path / "verdicts.jsonl", Slow()
    await Asking(judge(cache=str(file)), slow)(said("a"))
    whole = file.read_bytes()
    file.write_bytes(b'{"key": 3, "reply": "x"}\n\xff\xfe\n[]\n' + whole + whole[:30])
    with pytest.warns(UserWarning, match="4 damaged lines") as warned:
        asking = Asking(judge(cache=str(file)), slow)
    assert len(warned) == 1
    await asking(said("a"))
    await asking(said("b"))
    assert asking.calls == 1
    last = file.read_bytes().splitlines()[-1]
    assert json.loads(last)["reply"] == "reply to b", "the line that was cut off has swallowed nothing"


async def test_a_budget_counts_requests_and_not_recorded_answers() -> None:
    asking = Asking(judge(budget=2), Slow())
    for text in "aabb":
        await asking(said(text))
    with pytest.raises(TrainingHalted, match="budget"):
        await asking(said("c"))
    assert await asking(said("a")) == "reply to a"


async def test_a_failure_reaches_all_waiting_requests_and_is_not_cached() -> None:
    asked: list[int] = []

    async def once_broken(messages: Sequence[Message]) -> str:
        asked.append(1)
        await asyncio.sleep(0)
        if len(asked) == 1:
            raise EpisodeError("gone")
        return "here"

    asking = Asking(judge(), once_broken)
    found = await asyncio.gather(*(asking(said("a")) for _ in range(3)), return_exceptions=True)
    assert [str(each) for each in found] == ["gone"] * 3
    assert await asking(said("a")) == "here"


async def test_where_who_asked_is_cancelled_another_asks() -> None:
    slow = Slow()
    asking = Asking(judge(), slow)
    first, second = (asyncio.create_task(asking(said("a"))) for _ in range(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    assert await second == "reply to a"
    assert slow.asked == ["a", "a"]
