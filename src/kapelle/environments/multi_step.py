"""Chains of small calculations from left to right: `7 add 5 times 3 take 4` is 32.

A chain of agents can do a step each, and one slip anywhere spoils the end: difficulty is the number of steps.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from kapelle.environments.procedural import Difficulty, Problem, describe, draw_task
from kapelle.environments.question_world import QuestionWorld
from kapelle.grading.math.numeric import Number, grade_numeric, normal_form, read_number
from kapelle.grading.text.extraction import ExtractionRule, extract
from kapelle.settings.base import Settings
from kapelle.types import Message, Split, Task

HARDEST = 20


class MultiStep(Settings):
    """Whole numbers from 0 to `largest`, never below or above on the way."""

    name: Literal["multi_step"] = "multi_step"
    difficulty: Difficulty = (2, 4)
    """Fewest and most steps, 1 to 20."""
    largest: int = Field(99, ge=20)
    """No value on the way is greater."""
    seed: int = 0
    """Another seed gives other tasks in another order; the split of the problems stays."""
    extraction: tuple[ExtractionRule, ...] = Field(("last_number",), min_length=1)
    """Where an answer is looked for in an agent's text."""

    @model_validator(mode="after")
    def _possible(self) -> MultiStep:
        if self.difficulty[1] > HARDEST:
            raise ValueError(f"`difficulty` goes to {self.difficulty[1]}; the hardest is {HARDEST}")
        return self

    @property
    def reward_range(self) -> tuple[float, float]:
        """An answer is right or wrong."""
        return (0.0, 1.0)

    @property
    def sources(self) -> Mapping[Split, str]:
        """Generated; a hash of each problem decides its split."""
        return describe("chains of calculations", self.difficulty)

    def check(self, agents: Sequence[str]) -> None:
        """Accept any team."""

    def size(self, split: Split) -> int | None:
        """Tasks are generated without end."""
        return None

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index."""
        return draw_task(self.name, self.seed, split, index, self.difficulty, self._problem)

    def _problem(self, draw: random.Random, steps: int) -> Problem:
        value = draw.randint(1, 20)
        words, values = [str(value)], []
        for _ in range(steps):
            word, operand, value = draw.choice(_moves(value, self.largest, draw))
            words.append(f"{word} {operand}")
            values.append(value)
        question = " ".join(words)
        return Problem(question, {"answer": value, "values": values}, question)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> QuestionWorld:
        """Open the world of one problem."""
        gold = Number(task.data["answer"])
        info = {"difficulty": task.data["difficulty"]}
        return QuestionWorld(task, agents, lambda text: grade_numeric(text, gold, self.extraction), info)

    def extract(self, text: str) -> str | None:
        """Return the final number of a text, None when it has none."""
        found = extract(text, self.extraction).text
        number = None if found is None else read_number(found)
        return None if number is None else normal_form(number)

    def script(self, agent: str, task: Task, heard: Sequence[Message], seed: int) -> str:
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
