"""Tests whose templates were never trained on: what is left of a problem without its numbers and names."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from kapelle.environments.procedural import Algebra, MultiStep, WordProblems
from kapelle.environments.questions import Problem
from kapelle.errors import DataError
from kapelle.runtime.foreign_code import Unfit
from kapelle.setup.preparation import prepare
from kapelle.setup.recipe import resolve

NUMBER = re.compile(r"\d+")


def shape(environment: Any, split: Any, index: int) -> str:
    """Return a task without its numbers, and without names and things where it has them."""
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
def test_no_template_of_the_tests_is_ever_trained_on(kind: tuple[type[Any], dict[str, Any]]) -> None:
    made, more = kind
    apart = made(held_out="template", **more)
    trained = {shape(apart, "train", k) for k in range(1500)}
    tested = {shape(apart, "test", k) for k in range(300)}
    assert len(tested) > 1
    assert trained & tested == set()
    usual = made(**more)
    assert {shape(usual, "train", k) for k in range(1500)} & {shape(usual, "test", k) for k in range(300)}
    assert "templates" in apart.sources["test"]
    assert apart.task("train", 3) == made(held_out="template", **more).task("train", 3)


def test_a_level_whose_templates_all_lie_in_the_other_split_says_so() -> None:
    few = MultiStep(difficulty=(1, 1), held_out="template")
    with pytest.raises(
        DataError, match=r"all its templates lie in the other one\. Set `environment\.difficulty` higher"
    ):
        few.task("test", 0)


class Sums(MultiStep):
    """Somebody's own, which names no templates."""

    def problem(self, draw: random.Random, level: int) -> Problem:
        number = draw.randint(0, 999)
        return Problem(f"{number}?", {"answer": number}, str(number))


def test_an_environment_without_templates_is_refused() -> None:
    with pytest.raises(Unfit, match="gives no `template`"):
        Sums(held_out="template").task("train", 0)


def test_a_recipe_holds_templates_out() -> None:
    prepared = prepare(
        resolve(
            {
                "environment": {"name": "word_problems", "held_out": "template"},
                "workflow": {"name": "solo"},
                "algorithm": {"name": "grpo"},
                "model": {"embedded": {"context": 2048}},
            }
        )
    )
    environment: Any = prepared.config.environment
    assert environment.sources["train"].endswith("templates")
