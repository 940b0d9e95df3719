"""A final answer is worked out, and is not a formula that the question already holds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kapelle.environments.grading.math.grade import Undecided, read_math, unless_copied
from kapelle.environments.grading.text.extraction import FORMULA
from kapelle.environments.math import Math
from kapelle.types import Task


def score(answer: str, gold: str, question: str = "") -> float | None:
    grade = read_math(rf"\boxed{{{answer}}}", gold, ["last_box"])
    return None if isinstance(grade, Undecided) else unless_copied(grade, gold, question).score


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("255", "(2+1)(2^2+1^2)(2^4+1^4)"),
        ("7", "3+4"),
        ("7", "7+0"),
        ("-1", "2 + -3"),
        ("12", r"3\times 4"),
        ("12", "3·4"),
        ("12", "(3)(4)"),
        ("1024", "2^{10}"),
        ("120", "5!"),
        ("10", r"\binom{5}{2}"),
        ("5", "10/2"),
        ("5", r"\frac{10}{2}"),
        ("4", r"\frac{6}{\frac{3}{2}}"),
        ("3", r"\sqrt{9}"),
        ("5", r"\sqrt{3^2+4^2}"),
        ("2", r"\log_2 4"),
        ("1", r"\sin^2 2+\cos^2 2"),
        (r"\frac{1}{2}", r"\sin 30^\circ"),
        (r"\frac{\sqrt{3}}{2}", r"\cos 30^\circ"),
        (r"\frac{1}{4}", r"\frac{2^2 \cdot 2^{-3}}{2^3 \cdot 2^{-2}}"),
        ("2", r"\sqrt[3]{8}"),
        ("4", r"|{-4}|"),
        ("5-12i", "(3-2i)^2"),
        ("9y", "2y+3y+4y"),
        ("-1, 5", r"2 \pm 3"),
        ("(3, 7)", "(1+2, 7)"),
        ("x > 7", "x > 3 + 4"),
        (r"\begin{pmatrix}4 \\ 6\end{pmatrix}", r"2\begin{pmatrix}2 \\ 3\end{pmatrix}"),
        (r"14\text{ cm}", r"2 \cdot 7\text{ cm}"),
        ("84", "x = 41 = 168/2"),
    ],
)
def test_what_still_has_to_be_worked_out_receives_nothing(gold: str, answer: str) -> None:
    assert score(answer, gold) == 0.0
    assert score(gold, gold) == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("0.75", r"\frac{3}{4}"),
        ("3.5", r"3\frac{1}{2}"),
        (r"2\sqrt{3}", r"\sqrt{12}"),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
        (r"\frac{1+\sqrt{5}}{2}", r"\frac{1}{2}(1+\sqrt{5})"),
        (r"2\pi", r"2 \cdot \pi"),
        ("602000", r"6.02 \times 10^5"),
        ("3-2i", "-2i+3"),
        ("10", r"\binom{5}{2} = 10"),
        ("84", "x = 84 = 168/2"),
        (r"\binom{10}{5}", "252"),
        ("2^{10}", "4^5"),
        (r"x^2+2x+1", "(x+1)^2"),
    ],
)
def test_usual_forms_of_finished_answers_receive_1(gold: str, answer: str) -> None:
    assert score(answer, gold) == 1.0


@pytest.mark.parametrize(
    ("question", "gold", "answer"),
    [
        (r"Expand $(x+2)(x+5)$.", "x^2 + 7x + 10", "(x+2)(x+5)"),
        (r"Expand $(x+2)(x+5)$.", "x^2 + 7x + 10", r"\left(x+2\right) \left(x+5\right)"),
        (r"Factor $36x^2-25$.", "(6x-5)(6x+5)", "36x^2 - 25"),
        (r"Express $\frac{37}{80}$ as a decimal.", "0.4625", r"\dfrac{37}{80}"),
        (r"Simplify $\frac{84}{144}.$", r"\frac{7}{12}", r"\frac{84}{144}"),
        (r"Rationalize $\frac{1}{\sqrt{2}-1}$.", r"\sqrt{2}+1", r"\frac{1}{\sqrt{2}-1}"),
        ("What is 84/144 in lowest terms?", r"\frac{7}{12}", "84/144"),
    ],
)
async def test_a_formula_of_the_question_is_not_an_answer(question: str, gold: str, answer: str) -> None:
    assert score(answer, gold, question) == 0.0
    assert score(gold, gold, question) == 1.0
    environment = Math(extraction=("last_box",))
    world = environment.start(Task("test-0", question, {"answer": gold}), ["agent"], 0)
    await world.step({"agent": rf"\boxed{{{answer}}}"})
    assert world.outcome().rewards == {"agent": 0.0}


@pytest.mark.parametrize(
    ("question", "gold", "answer"),
    [
        (r"Which is larger, $\frac{1}{2}$ or $\frac{1}{3}$?", r"\frac{1}{2}", "1/2"),
        ("What is 5 - 2?", "3", "3"),
        ("Is it -5 or 5 degrees?", "-5", "-5"),
        (r"Write $\frac{84}{144}$ in lowest terms.", r"\frac{7}{12}", r"\frac{14}{24}"),
    ],
)
def test_an_answer_that_occurs_in_the_question_may_be_given(question: str, gold: str, answer: str) -> None:
    assert score(answer, gold, question) == 1.0


@pytest.mark.parametrize("each", [48, pytest.param(12, marks=pytest.mark.long)])
def test_formulas_of_questions_of_math_receive_nothing(each: int, data_folder: Path) -> None:
    """Copied formulas were accepted for 7.9 % of the problems before answers had to be finished."""
    rows = json.loads(gzip.decompress((data_folder / "deepscaler_parts/train_math.json.gz").read_bytes()))
    rows = [row for row in rows[::each] if row["answer"]]
    paid = 0
    for row in rows:
        question, gold = row["problem"], str(row["answer"])
        assert score(gold, gold, question) == 1.0
        formulas = {next(part for part in found.groups() if part) for found in FORMULA.finditer(question)}
        paid += any(
            score(formula, gold, question) == 1.0 for formula in formulas if formula.strip(" .") not in gold
        )
    assert len(rows) > 6000 / each
    assert paid <= 1
