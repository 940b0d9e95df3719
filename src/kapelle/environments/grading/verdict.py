"""The verdict of a grader on one answer, and functions that create verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["graded", "no_answer", "ungraded"]

SHOWN = 80
"""Maximum number of characters of an answer in an explanation."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one answer."""

    score: float
    """The score of the answer in [0, 1]; the score is 0 unless `status` is `graded`."""
    answer: str | None
    """The extracted answer in normal form, or None if there is no answer."""
    explanation: str
    """The reason for the score as human-readable text."""
    status: Status = "graded"
    """Whether the answer was graded. `graded` means that the grader scored the answer. `no_answer` means that the response
    contains no valid answer and scores 0. `ungraded` means that the grader itself failed, regardless of the answer; the
    score of such a verdict must not be used as a reward."""

    def __post_init__(self) -> None:
        assert 0.0 <= self.score <= 1.0, "a score lies in [0, 1]"
        assert self.status == "graded" or self.score == 0.0, "only a graded answer has a score above 0"


def right(answer: str) -> Grade:
    """Return the verdict on a correct answer."""
    return Grade(1.0, answer, f"{answer[:SHOWN]} is right.")


def wrong(answer: str, gold: str) -> Grade:
    """Return the verdict on an answer that differs from the gold answer."""
    return Grade(0.0, answer, f"{answer[:SHOWN]} is wrong; the answer is {gold[:SHOWN]}.")


def no_answer(why: str) -> Grade:
    """Return the verdict on a response without a valid answer."""
    return Grade(0.0, None, why, "no_answer")


def ungraded(answer: str | None, why: str) -> Grade:
    """Return the verdict of a grader that failed."""
    return Grade(0.0, answer, why, "ungraded")
