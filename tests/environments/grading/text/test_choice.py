from __future__ import annotations

import pytest

from kapelle.environments.grading.text.match import grade_choice

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
        ("Bern", 1.0, "graded"),
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


SENTENCES = [
    "The answer is B.",
    "The answer is (B).",
    "The answer is **B**.",
    "**The answer is B.**",
    "The correct answer is B",
    "The correct answer is: B",
    "Answer: B",
    "**Answer:** B",
    "Final answer: (B)",
    "Option B",
    "Option (B) is correct.",
    "B is correct.",
    "B is the correct answer.",
    "(B) is right",
    "I choose B.",
    "So it is B) Bern.",
    "My choice is option B.",
    "The capital is Bern.",
    "Bern",
    "bern.",
    "B - Bern",
    "B, Bern",
    "B (Bern)",
    "**B.** Bern",
    "$B$",
    r"$\textbf{(B)}$",
    r"\mathrm{B}",
    r"\text{(B) Bern}",
    r"\boxed{B}",
    "It is not Zürich. The answer is B.",
    "Zürich is larger.\nThe answer is B.",
]


@pytest.mark.parametrize("answer", SENTENCES)
def test_a_sentence_may_state_the_choice(answer: str) -> None:
    assert grade_choice(f"<answer>{answer}</answer>", "B", CAPITALS, ["tag"]).score == 1.0
    assert grade_choice(answer, "B", CAPITALS, ["whole"]).score == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "The answer is not B.",
        "B is not correct.",
        "B isn't the answer",
        "It is never B",
        "The wrong answer is B",
        "The answer is A or B.",
        "The answer is either B or C.",
        "The answer is B, C",
        "The answer is B and C",
        "The answer is B) Zürich",
        "B or Bern",
        "Bern or Zürich",
        "The answer is Bernina",
        "The answer is E.",
        "Between A and B",
        "The answer is A.",
        "The answer is New York",
    ],
)
def test_a_sentence_with_another_or_no_choice_scores_0(answer: str) -> None:
    assert grade_choice(answer, "B", CAPITALS, ["whole"]).score == 0.0
