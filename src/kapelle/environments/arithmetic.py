"""Addition and subtraction in columns: a task that one agent prepares and another finishes.

The first agent reads `47+85` and writes notes, the second reads the notes alone and writes the answer:

    47+85  →  2,12+1  →  132        85-47  →  8,4-1  →  38

The notes go from the units up. Every column below the top gives its last digit before the carry that comes
in, the top column gives its sum in full, and `+1` (`-1` when subtracting) marks a carry (a borrow) that
comes in from the column below. The units' sum is not in the notes, so without the mark nobody who reads
only them can tell `132` from `122`: the team needs both agents, and each can have its own bad habit.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from kapelle.environments.question_world import QuestionWorld
from kapelle.errors import ConfigError, did_you_mean
from kapelle.grading.math.numeric import Number, grade_numeric, normal_form, read_number
from kapelle.grading.text.extraction import ExtractionRule, extract
from kapelle.settings.base import Settings
from kapelle.types import Message, Split, Task

Role = Literal["columns", "combine", "solve"]
"""`columns`: question → notes. `combine`: notes → answer. `solve`: question → answer."""

TEST_SHARE = 5
"""One pair of operands in this many belongs to the test split."""


class Arithmetic(Settings):
    """Procedural problems `a+b` and `a-b` with answers that are never negative."""

    name: Literal["arithmetic"] = "arithmetic"
    digits: int = Field(2, ge=1, le=12)
    """Digits of both operands; the first is never 0, save for one-digit operands."""
    operators: tuple[Literal["+", "-"], ...] = Field(("+",), min_length=1)
    """Drawn evenly for each task."""
    carry_share: float | None = Field(None, ge=0.0, le=1.0)
    """Share of tasks whose units column carries or borrows; null leaves it to chance (45 % for `+`)."""
    seed: int = 0
    """Another seed gives other tasks in another order; the split of the operand pairs stays."""
    extraction: tuple[ExtractionRule, ...] = Field(("last_number",), min_length=1)
    """Where an answer is looked for in an agent's text."""
    roles: Mapping[str, Role] = Field(default={"reasoner": "columns", "actor": "combine"})
    """What the script plays for an agent of this name; it solves for any other."""
    flaws: Mapping[str, float] = Field(default={})
    """Agent → share of the demonstrations with a carry in which the script drops or ignores it."""

    @model_validator(mode="after")
    def _possible(self) -> Arithmetic:
        if self.digits == 1 and "-" in self.operators and self.carry_share:
            raise ValueError(
                "One-digit subtractions never borrow. Leave out `carry_share`, or set `digits: 2`."
            )
        wrong = {agent: share for agent, share in self.flaws.items() if not 0.0 <= share <= 1.0}
        if wrong:
            agent, share = next(iter(wrong.items()))
            raise ValueError(f"`flaws.{agent}` is {share}; it is a share between 0 and 1.")
        return self

    @property
    def reward_range(self) -> tuple[float, float]:
        """An answer is right or wrong."""
        return (0.0, 1.0)

    @property
    def sources(self) -> Mapping[Split, str]:
        """The operand pairs of each split; a hash of the pair decides, so they share none."""
        kind = f"generated problems of {self.digits} digits"
        return {
            "train": f"{kind}, {TEST_SHARE - 1} of {TEST_SHARE} operand pairs",
            "test": f"{kind}, the other operand pairs",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError when `flaws` names an agent that is not there."""
        for agent in self.flaws:
            if agent not in agents:
                raise ConfigError(
                    f"environment.flaws names the unknown agent '{agent}'.{did_you_mean(agent, agents)}"
                )

    def size(self, split: Split) -> int | None:
        """Tasks are generated without end."""
        return None

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

    def start(self, task: Task, agents: Sequence[str], seed: int) -> QuestionWorld:
        """Open the world of one problem."""
        gold = Number(task.data["answer"])
        return QuestionWorld(
            task,
            agents,
            lambda text: grade_numeric(text, gold, self.extraction),
            {"carry": _has_carry(task.question)},
        )

    def extract(self, text: str) -> str | None:
        """Return the final number of a text, None when it has none."""
        found = extract(text, self.extraction).text
        number = None if found is None else read_number(found)
        return None if number is None else normal_form(number)

    def script(self, agent: str, task: Task, heard: Sequence[Message], seed: int) -> str:
        """Return what the agent's role says, without the carry in the stated share of demonstrations."""
        flawed = random.Random(f"{seed}/{agent}").random() < self.flaws.get(agent, 0.0)
        role = self.roles.get(agent, "solve")
        if role == "combine":
            return combine(heard[-1].content if heard else "", carry=not flawed)
        written = columns(task.question, carry=not flawed)
        return written if role == "columns" else combine(written, carry=True)


def split_of(a: int, b: int) -> Split:
    """Return the split that a pair of operands belongs to, in either order and for every operator."""
    low, high = sorted((a, b))
    digest = hashlib.blake2b(f"{low},{high}".encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "little") % TEST_SHARE == 0 else "train"


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


def _has_carry(question: str) -> bool:
    a, operator, b = _QUESTION.fullmatch(question).groups()  # type: ignore[union-attr]
    return any(_carries(int(a), operator, int(b)))


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
    """Return the answer that notes lead to, or `?` for notes that cannot be read."""
    parsed = [_COLUMN.fullmatch(part) for part in notes.strip().split(",")]
    if not all(parsed):
        return "?"
    values = [int(match[1]) + (int(match[2] or 0) if carry else 0) for match in parsed if match]
    low = "".join(str(value % 10) for value in reversed(values[:-1]))
    return str(int(f"{max(values[-1], 0)}{low}"))
