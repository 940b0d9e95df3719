"""Generated lists of sums, which a planner can give to several workers at once (workflow `swarm`).

    3+8;9+9;2+5  →  11;18;7

The script of the planner writes one subtask for each sum, or the whole list as one subtask in the fraction of demonstrations that
`flaws` sets. It then joins the reports. The script of every other agent computes the sums in its message.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from kapelle.environments.grading.text.extraction import ExtractionRule
from kapelle.environments.questions import (
    Answers,
    Difficulty,
    Flaws,
    Generated,
    Problem,
    check_flaws,
    flawed,
    words,
)
from kapelle.types import Message, Task

_SUM = re.compile(r"(\d{1,9})\+(\d{1,9})")


class SumLists(Generated):
    """Questions that consist of independent sums."""

    name: Literal["sum_lists"] = "sum_lists"
    things = "lists of sums"
    digits: int = Field(default=1, ge=1, le=9)
    """The maximum number of digits of each operand."""
    difficulty: Difficulty = (2, 4)
    """The minimum and maximum number of sums."""
    seed: int = 0
    """The seed of the task generator. Different seeds generate different tasks in a different order, but the split of a problem does
    not depend on the seed."""
    planner: str = "planner"
    """Name of the agent whose script plans and joins. Without such an agent, every script computes sums."""
    mark: str = "- "
    """The beginning of each subtask in the script of the planner."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("hash", "last_box", "whole"), min_length=1)
    """Rules that extract the answer from an agent's text."""
    flaws: Flaws = Field(default={})
    """Mapping from an agent to the fraction of its demonstrations that are flawed. The planner writes the whole list as one subtask, and
    other agents forget the carry."""

    @property
    def answers(self) -> Answers:
        """The grader of answers. An answer is a list of numbers, separated by semicolons."""
        return words(_answer, self.extraction, "no list of numbers")

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if `flaws` names an unknown agent."""
        check_flaws(self.flaws, agents)

    def problem(self, draw: random.Random, level: int) -> Problem:
        """Return `level` random sums."""
        pairs = [(draw.randrange(10**self.digits), draw.randrange(10**self.digits)) for _ in range(level)]
        question = ";".join(f"{a}+{b}" for a, b in pairs)
        return Problem(question, {"answer": ";".join(str(a + b) for a, b in pairs)}, question)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the plan, the joined reports or the sums, depending on the agent and on its last message."""
        text, is_flawed = messages[-1].content.strip(), flawed(self.flaws, agent, seed)
        if agent != self.planner:
            sums = [(int(a), int(b)) for a, b in _SUM.findall(text)]
            return ";".join(str(_without_carry(a, b) if is_flawed else a + b) for a, b in sums)
        if "+" not in text:
            return ";".join(text.splitlines())
        subtasks = [task.question] if is_flawed else task.question.split(";")
        return "\n".join(self.mark + subtask for subtask in subtasks)


def _without_carry(a: int, b: int) -> int:
    digits = max(len(str(a)), len(str(b)))
    return sum((a // 10**k + b // 10**k) % 10 * 10**k for k in range(digits))


def _answer(text: str) -> str | None:
    """Return a list of numbers without spaces, or None for any other text."""
    answer = "".join(text.split()).rstrip(";")
    return answer if re.fullmatch(r"\d{1,10}(;\d{1,10})*", answer) else None
