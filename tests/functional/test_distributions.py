"""Histograms count every value once, in bins that can be merged."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kapelle.functional.distributions import BINS, Histogram, added, histogram, read_histogram, stacked

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


def test_a_reward_of_0_or_1_is_two_bins_far_apart() -> None:
    found = histogram([0.0, 1.0, 1.0])
    assert found is not None
    assert (found.exponent, found.first) == (-4, 0), "a sixteenth: 17 bins, and a 32nd would be 33"
    assert found.counts[0] == 1
    assert found.counts[16] == 2


@given(VALUES)
def test_every_value_is_counted_once_where_it_belongs(values: list[float]) -> None:
    found = histogram(values)
    assert found is not None
    assert len(found.counts) <= BINS
    width = 2.0**found.exponent
    expected = Counter(math.floor(value / width) for value in values)
    assert found.at(found.exponent) == expected
    assert read_histogram(json.loads(json.dumps(found.row()))) == found
    assert sum(found.at(found.exponent + 3).values()) == len(values)


@given(VALUES, VALUES)
def test_joined_bins_are_those_of_all_values_together(one: list[float], two: list[float]) -> None:
    made = stacked([[each for each in (histogram(one), histogram(two)) if each]])
    assert made is not None
    assert len(made.rows[0]) <= 48
    width = 2.0**made.exponent
    expected = Counter(math.floor(value / width) - made.first for value in (*one, *two))
    assert {k: n for k, n in enumerate(made.rows[0]) if n} == expected


def test_extreme_and_endless_values_break_nothing() -> None:
    assert histogram([math.nan, math.inf]) is None
    found = histogram([-1e308, 1e308, 5e-324, math.inf])
    assert found is not None
    assert sum(found.counts) == 3
    assert stacked([]) is None
    assert stacked([[], [Histogram(0, 0, (1,))]]).rows == ((0,), (1,))  # type: ignore[union-attr]


ODD: list[Any] = [None, 7, [], [1, 2], [0, 0, []], [0, 0, [-1]], [0, 0, [True]], [0.5, 0, [1]], [0, 0, [1] * 99], [10**9, 0, [1]], [0, 10**99, [1]]]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_histogram_is_none(odd: Any) -> None:
    assert read_histogram(odd) is None


@given(st.lists(VALUES, min_size=1, max_size=5))
def test_what_is_added_is_the_histogram_of_all_values(parts: list[list[float]]) -> None:
    made = [each for part in parts if (each := histogram(part))]
    assert added(made) == histogram([value for part in parts for value in part])
