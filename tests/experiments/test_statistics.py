"""How claims are summed up and judged, against numbers by hand and published definitions."""

from __future__ import annotations

import math

import pytest
import torch
from experiments.claim import (
    Judged,
    Prediction,
    better,
    overall,
    summed_up,
)
from experiments.lab import Anatomy


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [
        ([0.2] * 10, "shown"),
        ([0.05] * 10, "not shown"),  # an effect, smaller than predicted
        ([-0.05] * 10, "contradicted"),
        ([-0.5, 0.9] * 5, "not shown"),  # too noisy
    ],
)
def test_a_verdict_is_by_the_whole_interval(numbers: list[float], verdict: str) -> None:
    prediction = better("new", "old", 0.1)
    assert prediction.judge(numbers)[0] == verdict
    assert prediction.of({"new": {"area": 0.7}, "old": {"area": 0.4}}) == pytest.approx(0.3)


def test_a_seed_without_any_signal_is_infinitely_noisy() -> None:
    gradient = {"agent": torch.ones(1, 2)}
    assert Anatomy(gradient, {"agent": torch.eye(2)[:, None]}, 10.0).noise == pytest.approx(10.0)
    assert Anatomy(gradient, {"agent": torch.zeros(4, 1, 2)}, 10.0).noise == math.inf
    middle, low, high = summed_up([*(5.0,) * 9, math.inf])
    assert (middle, low, high) == (5.0, 5.0, math.inf)


def test_an_upper_bound_is_judged_likewise() -> None:
    prediction = Prediction("small", lambda found: 0.0, at_most=0.1)
    assert [prediction.judge([number] * 10)[0] for number in (0.05, 0.2)] == ["shown", "contradicted"]
    assert prediction.holds(0.1)
    assert not prediction.holds(0.11)


def test_a_claim_needs_all_of_its_predictions() -> None:
    def judged(verdict: str) -> Judged:
        return Judged("", verdict, 0.0, 0.0, 0.0, "")  # type: ignore[arg-type]

    assert overall([judged("shown"), judged("shown")]) == "shown"
    assert overall([judged("shown"), judged("not shown")]) == "not shown"
    assert overall([judged("shown"), judged("not shown"), judged("contradicted")]) == "contradicted"


def test_an_algorithm_s_page_counts_the_predictions_about_it() -> None:
    def judged(verdict: str, *algorithms: str) -> Judged:
        return Judged("", verdict, 0.0, 0.0, 0.0, "", None, algorithms)  # type: ignore[arg-type]

    found = [judged("shown"), judged("not shown", "vdn"), judged("contradicted", "qmix", "vdn")]
    assert overall(found, "vdn") == "contradicted"
    assert overall(found[:2], "vdn") == "not shown"
    assert overall(found[:2], "qmix") == "shown"
    assert overall(found) == "contradicted"
