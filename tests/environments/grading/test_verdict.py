from __future__ import annotations

import pytest

from kapelle.environments.grading.verdict import Grade, no_answer


def test_only_a_graded_answer_can_score() -> None:
    assert no_answer("why").score == 0.0
    with pytest.raises(AssertionError):
        Grade(1.0, None, "the grader gave up", "ungraded")
    for score in (1.1, -0.1, float("nan")):
        with pytest.raises(AssertionError):
            Grade(score, "5", "")
