from __future__ import annotations

import pytest

from kapelle.environments.grading.code.grade import ProgramTests, grade_program
from kapelle.environments.sandbox.bubblewrap import Bubblewrap

SQUARE = ProgramTests(("assert square(3) == 9", "assert square(-2) == 4", "assert square(0) == 0"))


@pytest.mark.parametrize(
    ("solution", "passed"),
    [
        ("def square(x): return x * x", 3),
        ("def square(x): return abs(x) * 3", 2),
        ("def square(x): return 9", 1),
        ("def other(x): return x * x", 0),
        ("def square(x: return x", 0),
    ],
)
def test_each_test_is_counted_by_itself(sandbox: Bubblewrap, solution: str, passed: int) -> None:
    grade = grade_program(solution, SQUARE, sandbox)
    assert grade.passed == passed
    assert grade.score == passed / 3
    assert grade.solved == (passed == 3)
