"""Calibration of scores: by hand, recovered from known verifiers, saved and loaded."""

from __future__ import annotations

import json
import math
import random

import pytest

from kapelle.functional.calibration import Calibration, Kind, fit_calibration, read_calibration, sigmoid


def answers(temperature: float, shift: float, count: int = 20_000) -> tuple[list[float], list[bool]]:
    """Return scores of a judge that is `temperature` times too sure, and right ones as σ(score / temperature + shift) says."""
    draw = random.Random(0)
    scores = [draw.gauss(0.0, 3.0) for _ in range(count)]
    return scores, [draw.random() < sigmoid(score / temperature + shift) for score in scores]


def error(calibration: Calibration, scores: list[float], right: list[bool]) -> float:
    """Return the mean difference of prediction and share right over ten parts of equally many answers."""
    judged = [(calibration.probability(score), each) for score, each in zip(scores, right, strict=True)]
    ordered = sorted(judged, key=lambda each: each[0])  # equal ones stay as they were drawn
    size = len(ordered) // 10
    parts = [ordered[k * size : (k + 1) * size] for k in range(10)]
    return sum(abs(sum(p - r for p, r in part)) / size for part in parts) / 10


def test_isotonic_by_hand() -> None:
    # Scores 2 and 3 are the wrong way round and pooled to ½; the ends are half an answer of six away from 0 and 1.
    found = fit_calibration("isotonic", [1, 2, 3, 4, 4, 0], [False, True, False, True, True, False])
    assert found is not None
    assert [score for score, _ in found.points] == [0, 1, 2, 3, 4]
    assert [share for _, share in found.points] == pytest.approx([1 / 12, 1 / 12, 0.5, 0.5, 11 / 12])
    assert [found.probability(score) for score in (-9, 1.5, 2.2, 9)] == [
        pytest.approx(each) for each in (1 / 12, (1 / 12 + 0.5) / 2, 0.5, 11 / 12)
    ]


def test_the_temperature_of_a_judge_that_is_too_sure_is_found() -> None:
    scores, right = answers(2.5, 0.0)
    found = fit_calibration("temperature", scores, right)
    assert found is not None
    assert found.temperature == pytest.approx(2.5, rel=0.05)
    assert found.probability(0.0) == 0.5


@pytest.mark.parametrize(
    ("kind", "shift", "most"), [("temperature", 0.0, 0.02), ("isotonic", 0.0, 0.02), ("isotonic", 1.0, 0.02)]
)
def test_held_out_answers_are_calibrated(kind: Kind, shift: float, most: float) -> None:
    scores, right = answers(2.5, shift)
    half = len(scores) // 2
    found = fit_calibration(kind, scores[:half], right[:half])
    assert found is not None
    assert error(Calibration(), scores[half:], right[half:]) > 0.05
    assert error(found, scores[half:], right[half:]) < most


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
def test_the_order_of_scores_stays_and_it_is_read_as_it_was_written(kind: Kind) -> None:
    scores, right = answers(2.0, 0.5, 500)
    found = fit_calibration(kind, scores, right)
    assert found is not None
    rising = [found.probability(score) for score in sorted([*scores, -1e6, 1e6])]
    assert rising == sorted(rising)
    assert all(0.0 <= each <= 1.0 and math.isfinite(each) for each in rising)
    again = read_calibration(json.loads(json.dumps(found.row())))
    assert [again.probability(score) for score in scores] == [found.probability(score) for score in scores]


def test_answers_of_one_kind_fit_nothing_and_a_perfect_judge_stays_finite() -> None:
    assert fit_calibration("temperature", [1.0, 2.0], [True, True]) is None
    assert fit_calibration("none", [1.0, 2.0], [True, False]) is None
    found = fit_calibration("temperature", [-1.0, 1.0], [False, True])
    assert found is not None
    assert found.temperature == pytest.approx(0.05)


def test_without_one_it_is_the_sigmoid() -> None:
    assert read_calibration(None).probability(math.log(3)) == pytest.approx(0.75)
    with pytest.raises((KeyError, TypeError, ValueError)):
        read_calibration({"kind": "isotonic"})
