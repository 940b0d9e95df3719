"""Addition and subtraction in columns: a task that one agent prepares and another finishes.

The first agent reads `47+85` and writes notes, the second reads only the notes and writes the answer:

    47+85  →  2,12+1  →  132        85-47  →  8,4-1  →  38

The notes go from the units up. Every column below the top gives its last digit before the carry that comes
in, the top column gives its sum in full, and `+1` (`-1` when subtracting) marks a carry (a borrow) that
comes in from the column below. The units' sum is missing from the notes, so only the mark lets a reader
of the notes tell `132` from `122`: the team needs both agents, and each can have its own bad habit.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from kapelle.environments.questions import TEST_SHARE, Answers, Flaws, Questions, check_flaws, flawed, numbers
from kapelle.environments.questions import split_of as split_of_key
from kapelle.grading.text.extraction import ExtractionRule
from kapelle.types import Json, Message, Split, Task

Role = Literal["columns", "combine", "solve"]
"""`columns`: question → notes. `combine`: notes → answer. `solve`: question → answer."""


class Arithmetic(Questions):
    """Procedural problems `a+b` and `a-b` with answers that are never negative."""

    name: Literal["arithmetic"] = "arithmetic"
    digits: int = Field(default=2, ge=1, le=12)
    """Digits of both operands; leading zeros occur only in one-digit operands."""
    operators: tuple[Literal["+", "-"], ...] = Field(default=("+",), min_length=1)
    """Drawn evenly for each task."""
    carry_share: float | None = Field(default=None, ge=0.0, le=1.0)
    """Share of tasks whose units column carries or borrows; null leaves it to chance (45 % for `+`)."""
    seed: int = 0
    """Another seed gives other tasks in another order; the split of the operand pairs stays."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("last_number",), min_length=1)
    """Where an answer is looked for in an agent's text."""
    roles: Mapping[str, Role] = Field(default={"reasoner": "columns", "actor": "combine"})
    """What the script plays for an agent of this name; it solves for any other."""
    flaws: Flaws = Field(default={})
    """Agent → share of the demonstrations with a carry in which the script drops or ignores it."""

    @model_validator(mode="after")
    def _possible(self) -> Arithmetic:
        if self.digits == 1 and "-" in self.operators and self.carry_share:
            raise ValueError(
                "One-digit subtractions never borrow. Leave out `carry_share`, or set `digits: 2`."
            )
        return self

    @property
    def answers(self) -> Answers:
        """One number."""
        return numbers(self.extraction)

    @property
    def sources(self) -> Mapping[Split, str]:
        """The operand pairs of each split; a hash of the pair decides, so the splits are disjoint."""
        kind = f"generated problems of {self.digits} digits"
        return {
            "train": f"{kind}, {TEST_SHARE - 1} of {TEST_SHARE} operand pairs",
            "test": f"{kind}, the other operand pairs",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError when `flaws` names an unknown agent."""
        check_flaws(self.flaws, agents)

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index; drawn from the pairs of its split."""
        draw = random.Random(f"{self.seed}/{split}/{index}")
        low = 0 if self.digits == 1 else 10 ** (self.digits - 1)
        operator = draw.choice(self.operators)
        carry = None if self.carry_share is None else draw.random() < self.carry_share
        while True:
            a, b = draw.randrange(low, 10**self.digits), draw.randrange(low, 10**self.digits)
            if operator == "-" and a < b:
                a, b = b, a
            fits = carry is None or carry == (_carries(a, operator, b)[0] != 0)
            if fits and split_of(a, b) == split:
                break
        answer = a + b if operator == "+" else a - b
        return Task(f"{split}-{index}", f"{a}{operator}{b}", {"answer": answer})

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return whether any column carries or borrows."""
        a, operator, b = _QUESTION.fullmatch(task.question).groups()  # type: ignore[union-attr]
        return {"carry": any(_carries(int(a), operator, int(b)))}

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the text for the agent's role, without the carry in the stated share of demonstrations."""
        carry = not flawed(self.flaws, agent, seed)
        role = self.roles.get(agent, "solve")
        if role == "combine":
            return combine(messages[-1].content if messages else "", carry=carry)
        written = columns(task.question, carry=carry)
        return written if role == "columns" else combine(written, carry=True)


def split_of(a: int, b: int) -> Split:
    """Return the split that a pair of operands belongs to, in either order and for every operator."""
    return split_of_key(",".join(map(str, sorted((a, b)))))


_QUESTION = re.compile(r"([0-9]+)([+-])([0-9]+)")


def _digits(a: int, operator: str, b: int) -> list[int]:
    """Return each column's sum or difference from the units up, without carries."""
    width = len(str(max(a, b)))
    sign = 1 if operator == "+" else -1
    return [x + sign * y for x, y in zip(_padded(a, width), _padded(b, width), strict=True)]


def _padded(number: int, width: int) -> list[int]:
    return [int(digit) for digit in reversed(str(number).zfill(width))]


def _carries(a: int, operator: str, b: int) -> list[int]:
    """Return what each column below the top hands on, from the units up: 0, 1, or -1 for a borrow."""
    handed: list[int] = []
    for column in _digits(a, operator, b)[:-1]:
        handed.append((column + (handed[-1] if handed else 0)) // 10)
    # One-digit problems have no column above; their carry is that of the only one.
    return handed or [_digits(a, operator, b)[0] // 10]


def columns(question: str, *, carry: bool) -> str:
    """Return the notes on a question, with or without the marks of what is carried."""
    match = _QUESTION.fullmatch(question)
    assert match, f"not a question of this environment: {question}"
    a, operator, b = int(match[1]), match[2], int(match[3])
    sums = _digits(a, operator, b)
    carried = [0, *_carries(a, operator, b)][: len(sums)]
    shown = [*(column % 10 for column in sums[:-1]), sums[-1]]
    marks = [f"{handed:+d}" if handed and carry else "" for handed in carried]
    return ",".join(f"{column}{mark}" for column, mark in zip(shown, marks, strict=True))


_COLUMN = re.compile(r"([0-9]{1,2})([+-]1)?")


def combine(notes: str, *, carry: bool) -> str:
    """Return the answer that notes lead to, or `?` for unreadable notes."""
    parsed = [_COLUMN.fullmatch(part) for part in notes.strip().split(",")]
    if not all(parsed):
        return "?"
    values = [int(match[1]) + (int(match[2] or 0) if carry else 0) for match in parsed if match]
    low = "".join(str(value % 10) for value in reversed(values[:-1]))
    return str(int(f"{max(values[-1], 0)}{low}"))
