"""The cases that math-verify publishes for its comparison, and what our `math` grader says to them.

They stand in `math_verify_cases.toml`, with their source.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kapelle.environments.grading.math.grade import grade_math, math_processes
from kapelle.environments.grading.processes import AnswerLimits, KillableProcesses

CASES: dict[str, list[list[str]]] = tomllib.loads(
    Path(__file__).with_name("math_verify_cases.toml").read_text("utf-8")
)


@pytest.fixture(scope="module")
def patient_pool() -> Iterator[KillableProcesses]:
    """Time enough for the two sums, which take the library more than a second."""
    with math_processes(size=1, limits=AnswerLimits(cpu_s=20.0, wall_s=60.0)) as pool:
        yield pool


@pytest.mark.parametrize(("gold", "answer"), CASES["same"])
def test_published_as_the_same(gold: str, answer: str, patient_pool: KillableProcesses) -> None:
    grade = grade_math(answer, gold, ["whole"], patient_pool)
    assert grade.score == 1.0, grade


@pytest.mark.parametrize(("gold", "answer"), CASES["boxed"])
def test_published_as_the_same_in_prose(gold: str, answer: str, patient_pool: KillableProcesses) -> None:
    grade = grade_math(answer, gold, ["only_box"], patient_pool)
    assert grade.score == 1.0, grade


@pytest.mark.parametrize(("gold", "answer"), CASES["prose"])
def test_published_as_the_same_without_a_mark(
    gold: str, answer: str, patient_pool: KillableProcesses
) -> None:
    grade = grade_math(answer, gold, ["prose"], patient_pool)
    assert grade.score == 1.0, grade


@pytest.mark.parametrize(("gold", "answer"), CASES["hundredths"])
def test_published_percentages(gold: str, answer: str, patient_pool: KillableProcesses) -> None:
    assert grade_math(answer, gold, ["whole"], patient_pool, "hundredths").score == 1.0
    assert grade_math(answer, gold, ["whole"], patient_pool, "figure").score == 0.0


@pytest.mark.parametrize(("gold", "answer"), CASES["different"])
def test_published_as_different(gold: str, answer: str, patient_pool: KillableProcesses) -> None:
    grade = grade_math(answer, gold, ["whole"], patient_pool)
    assert grade.score == 0.0, grade
    assert grade.status != "ungraded", grade


@pytest.mark.slow
@pytest.mark.parametrize(("gold", "answer", "reason"), CASES["deviations"])
def test_published_as_the_same_and_not_rewarded(
    gold: str, answer: str, reason: str, patient_pool: KillableProcesses
) -> None:
    assert reason
    assert grade_math(answer, gold, ["whole"], patient_pool).score == 0.0
