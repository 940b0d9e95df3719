"""The verdict of a grader on one answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["graded", "no_answer", "ungraded"]

SHOWN = 80
"""Characters of an answer that an explanation quotes."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one answer."""

    score: float
    """In [0, 1]; 0 where the status is not `graded`."""
    answer: str | None
    """The answer that was found, in its normal form; None without one."""
    explanation: str
    """Why the score is what it is, for people."""
    status: Status = "graded"
    """`no_answer`: the text holds none that counts, a fault of the answer and worth 0. `ungraded`: the
    grader itself gave up, which says nothing about the answer and must never be used as a reward."""

    def __post_init__(self) -> None:
        assert 0.0 <= self.score <= 1.0, "a score lies in [0, 1]"
        assert self.status == "graded" or self.score == 0.0, "only a graded answer can earn anything"


def right(answer: str) -> Grade:
    """Return the verdict on the answer that was asked for."""
    return Grade(1.0, answer, f"{answer[:SHOWN]} is right.")


def wrong(answer: str, gold: str) -> Grade:
    """Return the verdict on another answer than the gold one."""
    return Grade(0.0, answer, f"{answer[:SHOWN]} is wrong; the answer is {gold[:SHOWN]}.")


def no_answer(why: str) -> Grade:
    """Return the verdict on a text that holds no answer that counts."""
    return Grade(0.0, None, why, "no_answer")


def ungraded(answer: str | None, why: str) -> Grade:
    """Return the verdict of a grader that gave up."""
    return Grade(0.0, answer, why, "ungraded")
