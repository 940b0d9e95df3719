"""Pictures of coloured squares on a grid, and a question about them that no text answers.

    colour   the one square's colour: red, green, blue, yellow, white or black
    count    how many squares of a named colour there are

Pictures are drawn here, by the task's own numbers, so that no data are needed; Pillow writes them as PNG. Several agents see the same
picture, or with `views: split` each one a part of the grid, so that only together they see all of it.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

from pydantic import Field

from kapelle.environment import SeenWorld, ShowsImages
from kapelle.environments.grading.text.extraction import ExtractionRule
from kapelle.environments.questions import (
    Answers,
    Flaws,
    Generated,
    Problem,
    QuestionWorld,
    check_flaws,
    flawed,
    words,
)
from kapelle.errors import AbsentPackage, ConfigError
from kapelle.types import Image, Json, Message, Task

COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (30, 170, 60),
    "blue": (40, 60, 220),
    "yellow": (240, 220, 40),
    "white": (250, 250, 250),
    "black": (10, 10, 10),
}
"""Name → red, green and blue, 0 to 255."""

GREY = (128, 128, 128)
"""What lies behind the squares."""

CELL = 8
"""Pixels of a cell's side at `scale: 1`."""


class Squares(Generated, ShowsImages):
    """Questions about a picture of coloured squares."""

    name: Literal["squares"] = "squares"
    things = "pictures of squares"
    ask: tuple[Literal["colour", "count"], ...] = Field(default=("colour",), min_length=1)
    """Drawn evenly for each task."""
    colours: int = Field(default=len(COLOURS), ge=2, le=len(COLOURS))
    """The first so many of red, green, blue, yellow, white and black."""
    scale: int = Field(default=1, ge=1, le=64)
    """How many times larger a cell is than 8 × 8 pixels; tiny vision towers read small pictures."""
    views: Literal["same", "split"] = "same"
    """`split` shows each agent its own columns of the grid alone, the others grey."""
    difficulty: tuple[int, int] = (2, 2)
    """Smallest and largest side of the grid, in cells, 2 to 6."""
    seed: int = 0
    """Another seed gives other tasks in another order; the split of the pictures stays."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("hash", "last_box", "whole"), min_length=1)
    """Where an answer is looked for in an agent's text."""
    flaws: Flaws = Field(default={})
    """Agent → share of the demonstrations in which the script does not look, and says `red` or 1."""

    @property
    def answers(self) -> Answers:
        """One word or number."""
        return words(_answer, self.extraction, "no colour or number")

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError for a grid that cannot be drawn, or where nothing writes pictures."""
        smallest, largest = self.difficulty
        if not 2 <= smallest <= largest <= 6:
            raise ConfigError(
                f"`environment.difficulty: {list(self.difficulty)}` is no range of sides from 2 to 6. Write [2, 4], for example."
            )
        if self.views == "split" and len(agents) > smallest:
            raise ConfigError(
                f"`environment.views: split` gives each of {len(agents)} agents columns of its own, but a grid may have {smallest}. Set "
                f"`environment.difficulty: [{len(agents)}, {max(largest, len(agents))}]`, or `views: same`."
            )
        check_flaws(self.flaws, agents)
        if find_spec("PIL") is None:
            raise AbsentPackage("`squares` draws pictures with Pillow: pip install 'kapelle[images]'.")

    def problem(self, draw: random.Random, level: int) -> Problem:
        """Return a picture of a grid with this side, and a question about it."""
        named = list(COLOURS)[: self.colours]
        cells = level * level
        if draw.choice(self.ask) == "colour":
            answer = draw.choice(named)
            grid = [""] * cells
            grid[draw.randrange(cells)] = answer
            question = "Which colour is the square?"
        else:
            asked = draw.choice(named)
            count = draw.randint(0, cells - 1)
            others = [each for each in named if each != asked]
            grid = [asked] * count + [draw.choice([*others, ""]) for _ in range(cells - count)]
            draw.shuffle(grid)
            answer, question = str(count), f"How many squares are {asked}?"
        return Problem(question, {"answer": answer, "grid": grid}, f"{question} {','.join(grid)}")

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the answer, or in the stated share of demonstrations what the agent says without looking."""
        if flawed(self.flaws, agent, seed):
            return self.answers.written("red" if task.data["answer"] in COLOURS else "1")
        return super().script(agent, task, messages, seed)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> SquaresWorld:
        """Open the world of one picture."""
        answers = self.answers
        side = round(len(task.data["grid"]) ** 0.5)
        shares = {
            agent: range(side * k // len(agents), side * (k + 1) // len(agents))
            for k, agent in enumerate(agents)
        }
        views = {
            agent: drawn(
                tuple(task.data["grid"]), self.scale, shares[agent] if self.views == "split" else range(side)
            )
            for agent in agents
        }
        return SquaresWorld(task, agents, answers, self.about(task), views)


class SquaresWorld(QuestionWorld, SeenWorld):
    """One attempt at a question about a picture."""

    def __init__(
        self,
        task: Task,
        agents: Sequence[str],
        answers: Answers,
        info: Mapping[str, Json],
        views: Mapping[str, Image],
    ) -> None:
        super().__init__(task, agents, lambda text: answers.grade(text, task), info)
        self._views = views

    def images(self, agent: str) -> Sequence[Image]:
        """Return the agent's picture."""
        return (self._views[agent],)


@lru_cache(256)
def drawn(grid: tuple[str, ...], scale: int, columns: range) -> Image:
    """Return the picture of a grid of colours by name, row by row; cells without one, and other columns, are grey."""
    from PIL import Image as Pillow

    side, size = round(len(grid) ** 0.5), CELL * scale
    picture = Pillow.new("RGB", (side * size, side * size), GREY)
    for place, colour in enumerate(grid):
        row, column = divmod(place, side)
        if colour and column in columns:
            box = (column * size, row * size, (column + 1) * size, (row + 1) * size)
            picture.paste(COLOURS[colour], box)
    written = io.BytesIO()
    picture.save(written, "PNG")
    return Image.of(written.getvalue())


def _answer(text: str) -> str | None:
    """Return a colour or a number as it is compared; None for anything else."""
    said = text.strip().lower().removesuffix(".")
    return said if said in COLOURS or (said.isdigit() and len(said) <= 3) else None
