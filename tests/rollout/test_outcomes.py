"""A run ends early only if nothing can succeed: the first episodes fail alike, and too many of the started ones have failed."""

from __future__ import annotations

import math

import pytest

from kapelle.errors import TrainingHalted
from kapelle.rollout.outcomes import FIRST, FirstFailures, in_range
from kapelle.types import Episode, Task

TASK = Task("a", "?")


def failed(error: str) -> Episode:
    return Episode(TASK, 0, ("solver",), error=error)


def test_the_same_error_of_the_first_episodes_ends_the_run() -> None:
    first = FirstFailures(0.2)
    for number in range(FIRST - 1):
        first.note(
            failed(f"ProgramEnded: session e-{number:x}4f of port {8000 + number}: no module"), running=7
        )
    with pytest.raises(TrainingHalted, match="no module") as halted:
        first.note(failed("ProgramEnded: session e-9c1 of port 9000: no module"), running=7)
    assert len(halted.value.groups) == FIRST


def test_episodes_that_still_run_may_succeed() -> None:
    first = FirstFailures(0.2)
    for _ in range(20):  # a tenth of the tasks have a damaged row, which fails at once
        first.note(failed("KeyError: 'answer'"), running=180)
    with pytest.raises(TrainingHalted):
        first.note(failed("KeyError: 'answer'"), running=80)


def test_nothing_ends_after_a_success_or_if_the_run_accepts_all_failures() -> None:
    first = FirstFailures(0.2)
    first.note(Episode(TASK, 0, ("solver",)), running=0)
    for each in (first, FirstFailures(1.0)):
        for _ in range(100):
            each.note(failed("KeyError: 'answer'"), running=0)


@pytest.mark.parametrize(
    ("total", "bounds", "accepted"),
    [
        (1.0 + 1e-10, (0.0, 1.0), True),  # a rounding error of a sum
        (1.0 + 1e-6, (0.0, 1.0), False),
        (-1e-6, (0.0, 1.0), False),
        (1e6 + 1e-4, (0.0, 1e6), True),  # relative to large bounds
        (math.nan, (-math.inf, math.inf), False),
    ],
)
def test_a_return_is_in_range_up_to_rounding(
    total: float, bounds: tuple[float, float], accepted: bool
) -> None:
    assert in_range(total, bounds) is accepted
