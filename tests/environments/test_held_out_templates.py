"""Test splits with their own templates: problems without their numbers and names."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from kapelle.environments.procedural import Algebra, MultiStep, WordProblems
from kapelle.environments.questions import Problem
from kapelle.runtime.foreign_code import Unfit

NUMBER = re.compile(r"\d+")


def shape(environment: Any, split: Any, index: int) -> str:
    """Return a task without its numbers, names and things."""
    task = environment.task(split, index)
    if isinstance(environment, WordProblems):
        return ";".join(NUMBER.sub("#", step.partition("=")[0]) for step in task.data["steps"])
    return NUMBER.sub("#", task.question)


@pytest.mark.parametrize(
    "kind",
    [
        (Algebra, {"difficulty": (4, 5)}),
        (MultiStep, {"difficulty": (3, 5)}),
        (WordProblems, {"difficulty": (2, 4)}),
    ],
    ids=lambda kind: kind[0].__name__,
)
def test_the_splits_share_no_template(kind: tuple[type[Any], dict[str, Any]]) -> None:
    made, more = kind
    apart = made(held_out="template", **more)
    trained = {shape(apart, "train", k) for k in range(500)}
    tested = {shape(apart, "test", k) for k in range(150)}
    assert len(tested) > 1
    assert trained & tested == set()
    usual = made(**more)
    assert {shape(usual, "train", k) for k in range(500)} & {shape(usual, "test", k) for k in range(150)}
    assert "templates" in apart.sources["test"]
    assert apart.task("train", 3) == made(held_out="template", **more).task("train", 3)


class Sums(MultiStep):
    """An environment without templates."""

    def problem(self, draw: random.Random, level: int) -> Problem:
        number = draw.randint(0, 999)
        return Problem(f"{number}?", {"answer": number}, str(number))


def test_an_environment_without_templates_is_an_error() -> None:
    with pytest.raises(Unfit, match="template"):
        Sums(held_out="template").task("train", 0)
