"""Batches of many callers: who is scored with whom, what is rejected, what one failure spoils."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from kapelle.services.reward.scores import Answered, Score
from kapelle.services.reward.service import FAILED, Batches, Full


class Slow:
    """Scores a text by its number, once it is let go; remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.entered, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, answers: Sequence[Answered]) -> Sequence[Score]:
        self.batches.append([each.text for each in answers])
        self.entered.release()
        self.go.acquire()
        if any(each.text == "bad" for each in answers):
            raise RuntimeError("a secret")
        return [Score(int(each.text) / 100, 0.0) for each in answers]

    def free(self) -> None:
        for _ in range(100):
            self.go.release()


def texts(*said: object) -> list[Answered]:
    return [Answered((), str(each)) for each in said]


def test_those_who_wait_are_the_next_batch_and_nobody_waits_for_more() -> None:
    slow = Slow()
    with Batches(slow, most=4, room=100) as batches:
        first = batches.submit(texts(1))
        slow.entered.acquire()
        second, third = batches.submit(texts(2, 3)), batches.submit(texts(4, 5, 6))
        assert batches.held == 6
        slow.free()
        assert [each.value for each in first.result(30)] == [0.01]
        assert [each.value for each in second.result(30)] == [0.02, 0.03]
        assert [each.value for each in third.result(30)] == [0.04, 0.05, 0.06]
        assert slow.batches == [["1"], ["2", "3", "4", "5"], ["6"]]
        assert batches.held == 0


def test_what_there_is_no_room_for_is_refused_and_who_goes_away_makes_room() -> None:
    slow = Slow()
    with Batches(slow, most=1, room=4) as batches:
        begun = batches.submit(texts(1, 2))
        slow.entered.acquire()
        waiting = batches.submit(texts(3, 4))
        with pytest.raises(Full, match="4 of at most 4 answers are waiting"):
            batches.submit(texts(5))
        assert waiting.cancel()
        assert batches.held == 2
        assert begun.cancel()
        assert batches.held == 1  # the model is at it
        last = batches.submit(texts(6))
        slow.free()
        assert [each.value for each in last.result(30)] == [0.06]
    assert slow.batches == [["1"], ["6"]]
    assert batches.held == 0


def test_an_answer_on_which_the_model_fails_spoils_no_other(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    slow.free()
    with Batches(slow, most=8, room=8) as batches:
        found = batches.submit(texts(1, "bad", 3)).result(30)
    assert [each.value for each in found] == [0.01, None, 0.03]
    assert found[1].row() == {"status": "ungraded", "reason": FAILED}
    assert "a secret" in caplog.text
