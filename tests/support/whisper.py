"""A game in which a debate must help: only the first agent is told the bit that everyone should say.

A text says 1 when its first byte is odd, so that a model that says anything at all is right half of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle.environments.grading.verdict import Grade, right, wrong
from kapelle.environments.questions import Answers, Questions, QuestionState
from kapelle.types import Message, Split, Task


class Whisper(Questions):
    """Tasks 0 and 1; who was not told reads `?`."""

    name: Literal["tests.support.whisper:Whisper"] = "tests.support.whisper:Whisper"

    @property
    def answers(self) -> Answers:
        return Answers(lambda text, task: graded(text, task.question), said)

    @property
    def sources(self) -> Mapping[Split, str]:
        return {"train": "both bits", "test": "both bits: a game has one split"}

    def size(self, split: Split) -> int | None:
        return 2

    def task(self, split: Split, index: int) -> Task:
        return Task(f"{split}-{index}", str(index))

    def start(self, task: Task, agents: Sequence[str], seed: int) -> WhisperState:
        return WhisperState(task, agents, lambda text: graded(text, task.question), {})

    def script(self, agent: str, task: Task, new_messages: Sequence[Message], seed: int) -> str:
        return task.question


class WhisperState(QuestionState):
    def observe(self, agent: str) -> str:
        return self.task.question if agent == self.agents[0] else "?"


def said(text: str) -> str | None:
    return str(text.encode()[0] % 2) if text else None


def graded(text: str, gold: str) -> Grade:
    answer = said(text) or ""
    return right(answer) if answer == gold else wrong(answer, gold)
