"""Chains of small calculations from left to right: `7 add 5 times 3 take 4` is 32.

A chain of agents can do a step each, and one slip anywhere spoils the end: difficulty is the number of steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kapelle.environments.questions import Answers, Difficulty, Generated, Problem, numbers, up_to
from kapelle.grading.text.extraction import ExtractionRule
from kapelle.types import Message, Task


class MultiStep(Generated):
    """Whole numbers from 0 to `largest`; intermediate values stay in that range too."""

    things: ClassVar[str] = "chains of calculations"
    name: Literal["multi_step"] = "multi_step"
    difficulty: Annotated[Difficulty, up_to(20)] = (2, 4)
    """Fewest and most steps, 1 to 20."""
    largest: int = Field(default=99, ge=20)
    """Greatest intermediate value."""
    seed: int = 0
    """Another seed gives other tasks in another order; the split of the problems stays."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("last_number",), min_length=1)
    """Where an answer is looked for in an agent's text."""

    @property
    def answers(self) -> Answers:
        """One number."""
        return numbers(self.extraction)

    def problem(self, draw: random.Random, level: int) -> Problem:
        """Return a chain of `level` steps."""
        value = draw.randint(1, 20)
        words, values = [str(value)], []
        for _ in range(level):
            word, operand, value = draw.choice(_moves(value, self.largest, draw))
            words.append(f"{word} {operand}")
            values.append(value)
        question = " ".join(words)
        return Problem(question, {"answer": value, "values": values}, question)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the value after every step; the last one is the answer."""
        return " ".join(map(str, task.data["values"]))


def _moves(value: int, largest: int, draw: random.Random) -> list[tuple[str, int, int]]:
    """Return one step of each kind that stays in range: (word, operand, value after it)."""
    add = draw.randint(1, 9)
    take = draw.randint(1, 9)
    factor = draw.choice((2, 3))
    moves = []
    if value + add <= largest:
        moves.append(("add", add, value + add))
    if value - take >= 0:
        moves.append(("take", take, value - take))
    if value and value * factor <= largest:
        moves.append(("times", factor, value * factor))
    return moves or [("take", value, 0)]
