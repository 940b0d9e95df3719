"""Small word problems in the manner of GSM8K: how much is left after things were bought, shared and packed.

Difficulty is the number of steps. Names and things vary; the numbers and steps alone make a problem, so that
a sum of the test split never reappears in training under another name.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kapelle.environments.questions import Answers, Difficulty, Generated, Problem, numbers, up_to
from kapelle.grading.text.extraction import ExtractionRule
from kapelle.types import Message, Task

_NAMES = ("Ada", "Ben", "Chen", "Dina", "Emre", "Femi", "Gita", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
_THINGS = ("apples", "books", "coins", "marbles", "pencils", "shells", "stamps", "stickers")


class WordProblems(Generated):
    """Stories of `difficulty` steps with answers from 0 to 999."""

    things: ClassVar[str] = "stories"
    name: Literal["word_problems"] = "word_problems"
    difficulty: Annotated[Difficulty, up_to(8)] = (1, 3)
    """Fewest and most steps of a story, 1 to 8."""
    seed: int = 0
    """Another seed gives other tasks in another order; the split of the problems stays."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("hash", "last_box", "last_number"), min_length=1)
    """Where an answer is looked for in an agent's text."""

    @property
    def answers(self) -> Answers:
        """One number."""
        return numbers(self.extraction)

    def problem(self, draw: random.Random, level: int) -> Problem:
        """Return a story of `level` steps."""
        name, things = draw.choice(_NAMES), draw.choice(_THINGS)
        value = draw.randint(2, 60)
        sentences, worked = [f"{name} has {value} {things}."], []
        for _ in range(level):
            sentence, calculation, value = draw.choice(_events(value, things, draw))
            sentences.append(sentence)
            worked.append(f"{calculation}={value}")
        question = " ".join([*sentences, f"How many {things} does {name} have now?"])
        return Problem(question, {"answer": value, "steps": worked}, ";".join(worked))

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return every step and the answer, marked as GSM8K does."""
        return "\n".join([*task.data["steps"], f"#### {task.data['answer']}"])


def _events(value: int, things: str, draw: random.Random) -> list[tuple[str, str, int]]:
    """Return what can happen next: (sentence, calculation, value after it)."""
    bought, given = draw.randint(2, 40), draw.randint(1, max(1, min(value, 40)))
    times, bags, each = draw.choice((2, 3, 4)), draw.randint(2, 5), draw.randint(2, 9)
    events = []
    if value + bought < 1000:
        events.append((f"Then {bought} more are bought.", f"{value}+{bought}", value + bought))
    if value + bags * each < 1000:
        events.append(
            (f"Next come {bags} bags of {each} {things} each.", f"{value}+{bags}*{each}", value + bags * each)
        )
    if 0 < given <= value:
        events.append((f"{given} of the {things} are given away.", f"{value}-{given}", value - given))
    if value and value * times < 1000:
        words = {2: "twice", 3: "three times", 4: "four times"}[times]
        events.append((f"A prize makes it {words} as many.", f"{value}*{times}", value * times))
    if value and value % times == 0:
        events.append(
            (
                f"They are shared evenly among {times} people, and one share is kept.",
                f"{value}/{times}",
                value // times,
            )
        )
    return events
