"""An environment that tiny models can judge: an answer is right when it says the question again."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle.environments.grading.verdict import Grade, right, wrong
from kapelle.environments.questions import Answers, Questions
from kapelle.types import Message, Split, Task

LETTERS = "abcdef"


class Copies(Questions):
    """Questions are words; the scripted expert copies them, and in half of the cases gets every letter wrong."""

    name: Literal["tests.support.copies:Copies"] = "tests.support.copies:Copies"
    letters: int = 2

    @property
    def answers(self) -> Answers:
        return Answers(lambda text, task: graded(text, task.question), lambda text: text or None)

    @property
    def sources(self) -> Mapping[Split, str]:
        return {"train": "four of five words", "test": "the other words"}

    def size(self, split: Split) -> int | None:
        return len(self.words(split))

    def words(self, split: Split) -> list[str]:
        total = len(LETTERS) ** self.letters
        held_out = [number for number in range(total) if (number % 5 == 0) == (split == "test")]
        return [self.word(number) for number in held_out]

    def word(self, number: int) -> str:
        return "".join(LETTERS[number // len(LETTERS) ** k % len(LETTERS)] for k in range(self.letters))

    def task(self, split: Split, index: int) -> Task:
        return Task(f"{split}-{index}", self.words(split)[index])

    def script(self, agent: str, task: Task, new_messages: Sequence[Message], seed: int) -> str:
        draw = random.Random(seed)
        if draw.random() < 0.5:
            return task.question
        return "".join(
            draw.choice([other for other in LETTERS if other != letter]) for letter in task.question
        )


def graded(text: str, gold: str) -> Grade:
    return right(text) if text == gold else wrong(text, gold)
