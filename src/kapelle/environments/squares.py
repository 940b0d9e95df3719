"""Images of coloured squares on a grid, with questions that can be answered only from the image.

    colour   the colour of the only square: red, green, blue, yellow, white or black
    count    the number of squares of a given colour

The images are generated from the data of the task, so no image files are needed. The package Pillow encodes the images as PNG. All
agents see the same image or, if `views` is `split`, each agent sees a part of the grid.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

from pydantic import Field

from kapelle.environment import ShowsImages, StateWithImages
from kapelle.environments.grading.text.extraction import ExtractionRule
from kapelle.environments.questions import (
    Answers,
    Flaws,
    Generated,
    Problem,
    QuestionState,
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
"""Mapping from the name of a colour to its red, green and blue values, from 0 to 255."""

GREY = (128, 128, 128)
"""The background colour of the images."""

CELL = 8
"""The side of a cell in pixels if `scale` is 1."""


class Squares(Generated, ShowsImages):
    """Questions about images of coloured squares."""

    name: Literal["squares"] = "squares"
    things = "pictures of squares"
    ask: tuple[Literal["colour", "count"], ...] = Field(default=("colour",), min_length=1)
    """The kinds of questions. The kind of each task is sampled uniformly."""
    colours: int = Field(default=len(COLOURS), ge=2, le=len(COLOURS))
    """The number of colours, which are taken in the order red, green, blue, yellow, white, black."""
    scale: int = Field(default=1, ge=1, le=64)
    """The size of a cell in units of 8 × 8 pixels. Very small vision encoders need small images."""
    views: Literal["same", "split"] = "same"
    """The part of the image that each agent sees. `same`: all agents see the whole image. `split`: each agent sees only its own
    columns of the grid, and all other columns are grey."""
    difficulty: tuple[int, int] = (2, 2)
    """The minimum and maximum side of the grid in cells, from 2 to 6."""
    seed: int = 0
    """The seed of the task generator. Different seeds generate different tasks in a different order, but the split of a problem does
    not depend on the seed."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("hash", "last_box", "whole"), min_length=1)
    """Rules that extract the answer from an agent's text."""
    flaws: Flaws = Field(default={})
    """Mapping from an agent to the fraction of its demonstrations in which the script ignores the image and answers `red` or 1."""

    @property
    def answers(self) -> Answers:
        """The grader of answers. An answer is one word or number."""
        return words(_answer, self.extraction, "no colour or number")

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if the grid is impossible or the package Pillow is not installed."""
        smallest, largest = self.difficulty
        if not 2 <= smallest <= largest <= 6:
            raise ConfigError(
                f"`environment.difficulty: {list(self.difficulty)}` must be a range of sides from 2 to 6, such as [2, 4]."
            )
        if self.views == "split" and len(agents) > smallest:
            raise ConfigError(
                f"`environment.views: split` needs a column for each of {len(agents)} agents, but a grid may have only {smallest}. Set "
                f"`environment.difficulty: [{len(agents)}, {max(largest, len(agents))}]`, or `views: same`."
            )
        check_flaws(self.flaws, agents)
        if find_spec("PIL") is None:
            raise AbsentPackage(
                "`squares` needs Pillow to draw pictures. Run: pip install 'kapelle[images]'."
            )

    def problem(self, draw: random.Random, level: int) -> Problem:
        """Return a random grid with `level` cells per side, and a question about its image."""
        named = list(COLOURS)[: self.colours]
        cells = level * level
        if draw.choice(self.ask) == "colour":
            answer = draw.choice(named)
            grid = [""] * cells
            grid[draw.randrange(cells)] = answer
            question = "Which colour is the square?"
        else:
            target = draw.choice(named)
            count = draw.randint(0, cells - 1)
            others = [each for each in named if each != target]
            grid = [target] * count + [draw.choice([*others, ""]) for _ in range(cells - count)]
            draw.shuffle(grid)
            answer, question = str(count), f"How many squares are {target}?"
        return Problem(question, {"answer": answer, "grid": grid}, f"{question} {','.join(grid)}")

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the correct answer as a demonstration, or `red` or 1 in the fraction of demonstrations that `flaws` sets."""
        if flawed(self.flaws, agent, seed):
            return self.answers.written("red" if task.data["answer"] in COLOURS else "1")
        return super().script(agent, task, messages, seed)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> SquaresState:
        """Start an episode of one image and return its state."""
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
        return SquaresState(task, agents, answers, self.about(task), views)


class SquaresState(QuestionState, StateWithImages):
    """The state of an episode of a question about an image."""

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
        """Return the image that the agent sees."""
        return (self._views[agent],)


@lru_cache(256)
def drawn(grid: tuple[str, ...], scale: int, columns: range) -> Image:
    """Return the image of a grid. The argument `grid` lists the names of colours row by row.

    Empty cells and all columns outside `columns` are grey.
    """
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
    """Return a colour or a number in normalised form, or None for any other text."""
    answer = text.strip().lower().removesuffix(".")
    return answer if answer in COLOURS or (answer.isdigit() and len(answer) <= 3) else None
