from __future__ import annotations

import pytest

from kapelle.grading.text.match import grade_choice

CAPITALS = {"A": "Zürich", "B": "Bern", "C": "New York", "D": "b"}


@pytest.mark.parametrize(
    ("answer", "score", "status"),
    [
        ("B", 1.0, "graded"),
        ("b", 1.0, "graded"),
        ("(B)", 1.0, "graded"),
        ("[B].", 1.0, "graded"),
        (r"\text{(B)}", 1.0, "graded"),
        ("**B**", 1.0, "graded"),
        ("B. Bern", 1.0, "graded"),
        ("B) bern.", 1.0, "graded"),
        ("A", 0.0, "graded"),
        ("C: New  York", 0.0, "graded"),
        ("B) Zürich", 0.0, "no_answer"),
        ("A or B", 0.0, "no_answer"),
        ("B, C", 0.0, "no_answer"),
        ("B. No, A", 0.0, "no_answer"),
        ("E", 0.0, "no_answer"),
        ("Bern", 0.0, "no_answer"),
        ("BB", 0.0, "no_answer"),
        ("В", 0.0, "no_answer"),
        ("Ｂ", 0.0, "no_answer"),
        ("not B", 0.0, "no_answer"),
        ("B" * 3000, 0.0, "no_answer"),
    ],
)
def test_one_letter_and_only_that(answer: str, score: float, status: str) -> None:
    grade = grade_choice(rf"\boxed{{{answer}}}", "B", CAPITALS, ["only_box"])
    assert (grade.score, grade.status) == (score, status)


def test_a_text_without_a_mark_picks_nothing() -> None:
    assert grade_choice("B", "B", CAPITALS, ["only_box"]).status == "no_answer"
    assert grade_choice("B", "B", CAPITALS, ["whole"]).score == 1.0
