"""Pairs of a gold answer and an answer in a box: `pairs.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kapelle.environments.grading.math.grade import grade_math, math_processes
from kapelle.environments.grading.processes import AnswerLimits, KillableProcesses

PAIRS: dict[str, list[list[str]]] = tomllib.loads(Path(__file__).with_name("pairs.toml").read_text("utf-8"))


@pytest.fixture(scope="module")
def patient_pool() -> Iterator[KillableProcesses]:
    with math_processes(size=1, limits=AnswerLimits(cpu_s=20.0, wall_s=60.0)) as pool:
        yield pool


@pytest.mark.sample(4)
@pytest.mark.parametrize(("gold", "answer"), PAIRS["right"])
def test_a_correct_answer_receives_1(gold: str, answer: str, patient_pool: KillableProcesses) -> None:
    grade = grade_math(rf"So it is \boxed{{{answer}}}.", gold, ["last_box"], patient_pool)
    assert grade.score == 1.0, grade


@pytest.mark.parametrize(("gold", "answer"), PAIRS["wrong"])
def test_an_incorrect_answer_receives_0(gold: str, answer: str, patient_pool: KillableProcesses) -> None:
    grade = grade_math(rf"So it is \boxed{{{answer}}}.", gold, ["last_box"], patient_pool)
    assert (grade.score, grade.status != "ungraded") == (0.0, True), grade
