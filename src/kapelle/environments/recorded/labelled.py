"""Recorded solutions with a label that says whether each is right: data for a verifier.

    {"question": "…", "solution": "…", "is_correct": true}
    {"question": "…", "small": {"solution": "…", "is_correct": false}, "large": {…}}      dots reach into objects

All rows of one question are one task, and sample k of its group says the k-th solution and earns its label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic import Field

from kapelle.environment import Recorded
from kapelle.environments.data.source import Row, Words, asked_in, field_of, said_in
from kapelle.environments.recorded.base import RecordedData, RecordedWorld
from kapelle.errors import DataError
from kapelle.types import Split, Task


class Question(NamedTuple):
    """A question and its solutions, (text, label) each."""

    text: str
    solutions: tuple[tuple[str, float], ...]


class Labelled(RecordedData, Recorded):
    """Solutions on record, each worth its label."""

    name: Literal["labelled"] = "labelled"
    question_field: str = "question"
    """The field that asks."""
    solutions: Mapping[str, str] = Field(default={"solution": "is_correct"}, min_length=1)
    """Field of a solution → field of its label: true, false, or a number between 0 and 1."""

    def answers_per_task(self) -> int:
        """As many as the question with most."""
        return max(len(each.solutions) for split in ("train", "test") for each in self._questions(split))

    def check(self, agents: Sequence[str]) -> None:
        """Read every row; DataError names file, line and field of those without solution or label, if they are many."""
        for split in ("train", "test"):
            self._questions(split)

    def _key(self) -> tuple[str, str, Words]:
        return self.question_field, "question_field", asked_in

    def _read(self, row: Row) -> list[tuple[str, float]]:
        return [
            (said_in(row, solution, "solutions"), _label(row, label))
            for solution, label in self.solutions.items()
        ]

    @cached_property
    def _by_split(self) -> dict[str, tuple[Question, ...]]:
        return {"train": self._gathered(self.rows.train), "test": self._gathered(self.rows.test)}

    def _gathered(self, rows: Sequence[Row]) -> tuple[Question, ...]:
        found: dict[str, dict[str, float]] = {}
        for row in rows:
            question = asked_in(row, self.question_field, "question_field")
            for text, label in self._read(row):
                # Of two labels for one text the first one counts.
                found.setdefault(question, {}).setdefault(text, label)
        return tuple(Question(text, tuple(solutions.items())) for text, solutions in found.items())

    def _questions(self, split: Split) -> tuple[Question, ...]:
        return self._by_split[split]

    def _question(self, task: Task) -> Question:
        split, _, index = task.id.rpartition("-")
        return self._questions("train" if split == "train" else "test")[int(index)]

    def size(self, split: Split) -> int | None:
        """Return the number of questions."""
        return len(self._questions(split))

    def task(self, split: Split, index: int) -> Task:
        """Return the question at an index."""
        return Task(f"{split}-{index}", self._questions(split)[index].text)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> RecordedWorld:
        """Open the world of one question."""
        question = self._question(task)
        worth = dict(question.solutions)
        return RecordedWorld(
            {agent: [question.text] for agent in agents}, lambda agent, text: worth.get(text)
        )

    def recorded(self, agent: str, task: Task, turn: int, sample: int) -> str:
        """Return solution `sample`, counted round and round."""
        solutions = self._question(task).solutions
        return solutions[sample % len(solutions)][0]


def _label(row: Row, field: str) -> float:
    value = field_of(row, field, "solutions")
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise DataError(
            f"{row.place}: the label '{field}' is {value!r}, not true, false or a number from 0 to 1. Fix or drop "
            "the row."
        )
    return float(value)
