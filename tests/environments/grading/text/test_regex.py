from __future__ import annotations

import pytest

from kapelle.environments.grading.processes import KillableProcesses
from kapelle.environments.grading.text.match import grade_regex


@pytest.mark.parametrize(
    ("pattern", "answer", "score"),
    [
        (r"(?i)bern", "Bern", 1.0),
        (r"[0-9]{4}-[0-9]{2}", "2024-05", 1.0),
        (r"bern", "bern!", 0.0),
        (r"bern", "not bern", 0.0),
        (r"a|b", "ab", 0.0),
    ],
)
def test_the_whole_answer_matches(
    pattern: str, answer: str, score: float, regex_pool: KillableProcesses
) -> None:
    grade = grade_regex(f"#### {answer}", pattern, ["hash"], regex_pool)
    assert (grade.score, grade.answer, grade.status) == (score, answer, "graded")


def test_a_pattern_that_backtracks_for_ever_is_killed_and_the_next_one_is_graded(
    regex_pool: KillableProcesses,
) -> None:
    grade = grade_regex("#### " + "a" * 60, "(a+)+b", ["hash"], regex_pool)
    assert (grade.score, grade.status) == (0.0, "no_answer")
    assert "CPU" in grade.explanation
    assert grade_regex("#### aab", "(a+)+b", ["hash"], regex_pool).score == 1.0


def test_an_invalid_pattern_is_an_error_of_the_data_set(regex_pool: KillableProcesses) -> None:
    with pytest.raises(ValueError, match=r"'\(' .*regular expression: .* Fix"):
        grade_regex("#### a", "(", ["hash"], regex_pool)
