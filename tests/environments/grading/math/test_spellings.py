"""What one answer may be spelled like, and what is another answer: `spellings.toml`, and all golds of MATH and DeepMath."""

from __future__ import annotations

import gzip
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kapelle.environments.grading.math.grade import (
    gold_problem,
    grade_math,
    library_problem,
    math_processes,
)
from kapelle.environments.grading.math.notation import tidy
from kapelle.environments.grading.processes import AnswerLimits, KillableProcesses
from kapelle.environments.grading.text.extraction import extract

PAIRS: dict[str, list[list[str]]] = tomllib.loads(
    Path(__file__).with_name("spellings.toml").read_text("utf-8")
)


@pytest.fixture(scope="module")
def patient_pool() -> Iterator[KillableProcesses]:
    with math_processes(size=1, limits=AnswerLimits(cpu_s=20.0, wall_s=60.0)) as pool:
        yield pool


@pytest.mark.sample(4)
@pytest.mark.parametrize(("one", "other"), PAIRS["same"])
def test_another_spelling_is_rewarded(one: str, other: str, patient_pool: KillableProcesses) -> None:
    for gold, answer in ((one, other), (other, one)):
        grade = grade_math(answer, gold, ["whole"], patient_pool)
        assert grade.score == 1.0, grade


@pytest.mark.sample(4)
@pytest.mark.parametrize(("one", "other"), PAIRS["different"])
def test_another_answer_is_not_rewarded(one: str, other: str, patient_pool: KillableProcesses) -> None:
    for gold, answer in ((one, other), (other, one)):
        grade = grade_math(answer, gold, ["whole"], patient_pool)
        assert grade.score == 0.0, grade


@pytest.mark.parametrize("gold", ["", "x = 1 = 2", r"x = 1/3 \approx 0.4", r"\frac{1}{", r"G/N \cong K"])
def test_an_unreadable_gold_answer_is_ungraded(gold: str, patient_pool: KillableProcesses) -> None:
    grade = grade_math("5", gold, ["whole"], patient_pool)
    assert (grade.status, grade.score) == ("ungraded", 0.0)
    assert gold_problem(gold) or library_problem(gold, patient_pool)
    # Who writes what stands there is right even so.
    assert not gold or grade_math(gold, gold, ["whole"], patient_pool).score == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"The sum is $3+4$, so the answer is $\boxed{7}$.", "7"),
        (r"\(\boxed{1}\) and \(\boxed{-2}\).", "1, -2"),
        ("['$f(x)=x$']", "f(x) = x"),
        ("['3', '5']", "5, 3"),
        (r"\approx 8.24 \text{ mph}", "8.24"),
        ("We add the digits again and again. " * 20 + "Hence the answer is $12$.", "12"),
    ],
)
def test_the_gold_answer_of_a_solution_is_its_final_answer(
    gold: str, answer: str, patient_pool: KillableProcesses
) -> None:
    assert gold_problem(gold) == ""
    assert grade_math(answer, gold, ["whole"], patient_pool).score == 1.0


def golds(data_folder: Path) -> list[str]:
    math = json.loads(gzip.decompress((data_folder / "deepscaler_parts/train_math.json.gz").read_bytes()))
    deep = gzip.decompress((data_folder / "deepmath_sample/train.jsonl.gz").read_bytes()).splitlines()
    found = {str(row["answer"]) for row in math} | {str(json.loads(row)["ground_truth"]) for row in deep}
    return sorted(found - {""})


def spellings(gold: str) -> set[str]:
    found = {
        f"${gold}$", rf"\({gold}\)", rf"\[ {gold} \]", f"**{gold}**", f" {gold} ", rf"\boxed{{{gold}}}",
        gold.replace(r"\frac", r"\dfrac"), gold.replace(r"\left", "").replace(r"\right", ""),
        gold.replace("+", " + ").replace("=", " = "), gold.replace("{,}", ","),
    }  # fmt: skip
    if re.fullmatch(r"-?[0-9]+", gold):
        grouped = f"{int(gold):,}"
        found |= {
            f"x = {gold}",
            f"{gold}.0",
            rf"\text{{{gold}}}",
            rf"{gold}^\circ",
            f"({gold})",
            f"{gold} units",
        }
        found |= {
            grouped,
            grouped.replace(",", r"\,"),
            grouped.replace(",", "{,}"),
            grouped.replace(",", r",\!"),
        }
    ratio = re.fullmatch(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}", gold)
    if ratio:
        found |= {f"{ratio[1]}/{ratio[2]}", rf"x = \frac {{{ratio[1]}}} {{{ratio[2]}}}"}
    words = re.fullmatch(r"\\text\{([^{}]*)\}", gold)
    if words:
        found |= {words[1], rf"\textbf{{{words[1]}}}"}
    return found


def test_slow_texts_are_read_quickly() -> None:
    """Minutes where spaces at the end are tried in every way."""
    for piece in (" \n \\ ", "~", "\\, "):
        assert tidy((piece * 2_000)[:2_000] + "x").endswith("x")


def test_boxes_around_boxes_are_opened_a_few_times() -> None:
    assert extract("\\boxed{" * 3 + "5" + "}" * 3, ("last_box",)).text == "5"
    assert extract("\\boxed{" * 9000 + "5" + "}" * 9000, ("last_box",)).text is None
