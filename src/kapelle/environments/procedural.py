"""Tasks without end, drawn by seed: the same in every process, and never one problem in both splits."""

from __future__ import annotations

import hashlib
import random
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol

from pydantic import AfterValidator

from kapelle.environments.questions import Questions
from kapelle.errors import DataError
from kapelle.types import Json, Split, Task

TEST_SHARE = 5
"""One problem in this many belongs to the test split."""

TRIES = 2_000
"""Most draws for one task; if none of them fits the split, the settings are refused."""


def _ordered(span: tuple[int, int]) -> tuple[int, int]:
    if span[0] > span[1] or span[0] < 1:
        raise ValueError(f"`difficulty: {list(span)}` is no range. Write [easiest, hardest], both from 1")
    return span


Difficulty = Annotated[tuple[int, int], AfterValidator(_ordered)]
"""Easiest and hardest level of a task, both included; levels are drawn evenly."""


def up_to(hardest: int) -> AfterValidator:
    """Return a validator that refuses levels above the hardest one, for the type of a `difficulty`."""

    def check(span: tuple[int, int]) -> tuple[int, int]:
        if span[1] > hardest:
            raise ValueError(f"`difficulty` goes to {span[1]}; the hardest is {hardest}")
        return span

    return AfterValidator(check)


@dataclass(frozen=True, slots=True)
class Problem:
    """What one draw made."""

    question: str
    data: Mapping[str, Json]
    key: str
    """What makes it this problem: equal keys are one problem in other words, and lie in one split."""


def split_of(key: str) -> Split:
    """Return the split that a problem belongs to, by a hash of its key."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "little") % TEST_SHARE == 0 else "train"


def draw_task(
    name: str,
    seed: int,
    split: Split,
    index: int,
    difficulty: tuple[int, int],
    make: Callable[[random.Random, int], Problem],
) -> Task:
    """Return the task at an index: a level, then the first problem of that level that belongs to the split.

    Raises DataError where a level has no problem for it.
    """
    draw = random.Random(f"{name}/{seed}/{split}/{index}")
    level = draw.randint(*difficulty)
    for _ in range(TRIES):
        problem = make(draw, level)
        if split_of(problem.key) == split:
            return Task(f"{split}-{index}", problem.question, {**problem.data, "difficulty": level})
    raise DataError(
        f"`{name}` finds no problem of difficulty {level} for the {split} split in {TRIES} draws. "
        "Set `environment.difficulty` higher."
    )


def describe(what: str, difficulty: tuple[int, int]) -> dict[Split, str]:
    """Return where the tasks of both splits come from, in words."""
    kind = f"generated {what} of difficulty {difficulty[0]} to {difficulty[1]}"
    return {
        "train": f"{kind}, {TEST_SHARE - 1} of {TEST_SHARE} problems",
        "test": f"{kind}, the other problems",
    }


class _Drawn(Protocol):
    """What `Generated` reads of a subclass, whose settings stand in an order of their own."""

    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def difficulty(self) -> tuple[int, int]: ...

    things: ClassVar[str]

    def problem(self, draw: random.Random, level: int) -> Problem: ...


class Generated(Questions):
    """Base of environments that draw their tasks: a subclass has settings `difficulty` and `seed`, `answers`, and `problem`."""

    things: ClassVar[str] = "problems"
    """What is generated, in words."""

    @abstractmethod
    def problem(self, draw: random.Random, level: int) -> Problem:
        """Return a problem of a level, drawn from `draw` alone."""

    @property
    def sources(self: _Drawn) -> Mapping[Split, str]:
        """Generated; a hash of each problem decides its split."""
        return describe(self.things, self.difficulty)

    def task(self: _Drawn, split: Split, index: int) -> Task:
        """Return the task at an index: the same in every process."""
        return draw_task(self.name, self.seed, split, index, self.difficulty, self.problem)

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return the task's difficulty."""
        return {"difficulty": task.data["difficulty"]}
