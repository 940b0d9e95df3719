"""What is scored, and what it is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from kapelle.errors import ContextError
from kapelle.types import Json, Message

R = TypeVar("R")
Role = Literal["system", "user", "assistant", "tool"]
MOST_ITEMS = 4096
"""Answers in one call."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, and the conversation that it answers."""

    messages: tuple[Message, ...]
    """What comes before it; a question alone is one message of the user."""
    text: str


@dataclass(frozen=True, slots=True)
class Score:
    """What an answer is worth, or why nobody can say."""

    value: float | None
    """In [0, 1]: σ(logit), for a verifier the probability that the answer is right. None for one that is ungraded."""
    logit: float | None = None
    """None for one that is ungraded."""
    reason: str = ""
    """Why it is ungraded."""

    @property
    def status(self) -> Literal["scored", "ungraded"]:
        """`ungraded` says nothing about the answer, and must never be used as a reward."""
        return "ungraded" if self.value is None else "scored"

    def row(self) -> dict[str, Json]:
        """Return it as callers read it."""
        if self.value is None:
            return {"status": "ungraded", "reason": self.reason}
        return {"status": "scored", "score": self.value, "logit": self.logit}


def ungraded(reason: str) -> Score:
    """Return the score of an answer that cannot be scored."""
    return Score(None, reason=reason)


def score_each(
    answers: Sequence[Answered],
    read: Callable[[Answered], R],
    logits: Callable[[Sequence[R]], Sequence[float]],
) -> list[Score]:
    """Return the scores of a model that gives a logit for each answer which it can `read`.

    `read` raises ContextError for one that is too long: it is ungraded, and no other is the worse for it.
    """
    found: dict[int, R] = {}
    scores: dict[int, Score] = {}
    for place, answer in enumerate(answers):
        try:
            found[place] = read(answer)
        except ContextError as error:
            scores[place] = ungraded(str(error))
    if found:
        scores |= dict(zip(found, map(_score, logits(list(found.values()))), strict=True))
    return [scores[place] for place in range(len(answers))]


def _score(logit: float) -> Score:
    if not math.isfinite(logit):
        return ungraded("The model's score is not finite: its weights are broken.")
    return Score(0.5 + 0.5 * math.tanh(0.5 * logit), logit)


class Scorer(Protocol):
    """Scores answers; called by one thread."""

    def about(self) -> Mapping[str, Json]:
        """Return what callers are told of the model: its `name`, a hash of its `weights`, and what else is known of it."""
        ...

    def score(self, answers: Sequence[Answered]) -> Sequence[Score]:
        """Return a score for each answer; one that the model cannot read is ungraded."""
        ...
