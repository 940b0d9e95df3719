import math
import random
from collections.abc import Sequence
from statistics import NormalDist

import pytest

from kapelle.functional.statistics import (
    Quartiles,
    area_interval,
    area_under_curve,
    bootstrap_interval,
    interquartile_mean,
    mean_interval,
    probability_of_improvement,
    quartiles,
    rate_of,
    stratified_interval,
    t_quantile,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        # Newcombe 1998 (Statistics in Medicine 17, 857-872), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_intervals_are_the_published_ones(successes: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(successes, total) == pytest.approx((low, high), abs=5e-5)


def test_wilson_covers_what_it_promises() -> None:
    """At p = 0.1, n = 50 the exact coverage of the 95 % interval is 97.0 %; Wald's has 87.9 %."""
    covered = sum(
        math.comb(50, k) * 0.1**k * 0.9 ** (50 - k)
        for k in range(51)
        if wilson_interval(k, 50)[0] <= 0.1 <= wilson_interval(k, 50)[1]
    )
    assert covered == pytest.approx(0.970, abs=5e-4)


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [
        # The usual printed table of Student's t.
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 4, 2.776),
        (0.975, 9, 2.262),
        (0.975, 30, 2.042),
        (0.975, 120, 1.980),
        (0.975, 1000, 1.962),
        (0.995, 5, 4.032),
        (0.95, 7, 1.895),
        (0.75, 1, 1.000),
    ],
)
def test_t_quantiles_are_those_of_the_table(probability: float, freedom: int, value: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(value, abs=5.1e-4)


def test_t_quantiles_have_closed_forms_for_one_and_two_degrees() -> None:
    for p in (0.6, 0.9, 0.975, 0.999):
        assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9)
        assert t_quantile(p, 2) == pytest.approx((2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p))), rel=1e-9)


def test_t_quantiles_fall_to_the_normal_one_without_a_step() -> None:
    quantiles = [t_quantile(0.975, freedom) for freedom in (150, 199, 200, 201, 202, 400, 10**6)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert quantiles[2] - quantiles[3] == pytest.approx(quantiles[3] - quantiles[4], rel=0.05)
    assert quantiles[-1] == pytest.approx(NormalDist().inv_cdf(0.975), abs=1e-5)


def test_the_mean_interval_by_hand() -> None:
    # Mean 3, standard deviation √2.5, t(0.975, 4) = 2.776: 3 ± 2.776 · √0.5.
    assert mean_interval([1, 2, 3, 4, 5]) == pytest.approx((1.0368, 4.9632), abs=1e-4)
    assert mean_interval([7.0, 7.0, 7.0]) == (7.0, 7.0)
    assert mean_interval([7.0]) is None
    assert mean_interval([]) is None


def test_the_bootstrap_repeats_with_its_seed_and_agrees_with_theory() -> None:
    generator = random.Random(0)
    values = [generator.gauss(10, 2) for _ in range(200)]
    interval = bootstrap_interval(values, seed=1)
    assert interval == bootstrap_interval(values, seed=1)
    assert interval != bootstrap_interval(values, seed=2)
    student = mean_interval(values)
    assert student is not None
    assert interval == pytest.approx(student, abs=0.05)


def test_the_interquartile_mean_by_hand() -> None:
    assert interquartile_mean([100, 3, 1, 2]) == 2.5
    assert interquartile_mean([1, 2, 3, 4, 5, 6, 7, 800]) == 4.5
    # Five values: a quarter is one whole value on each side.
    assert interquartile_mean([-50, 1, 2, 6, 50]) == 3.0
    assert interquartile_mean([1, 2, 9]) == 4.0


def test_quartiles_by_hand() -> None:
    assert quartiles([5, 1, 4, 2, 3]) == Quartiles(2.0, 3.0, 4.0)
    assert quartiles([1, 2, 3, 4]) == Quartiles(1.75, 2.5, 3.25)
    assert quartiles([7.0]) == Quartiles(7.0, 7.0, 7.0)


def test_area_under_curve_by_hand() -> None:
    # Positives 3, 2, 1 against negatives 2, 0: 3 beats both, 2 ties one and beats one, 1 beats one: 4.5 of 6.
    assert area_under_curve([3, 2, 0, 1, 2], [True, True, False, True, False]) == 4.5 / 6
    assert area_under_curve([1, 1, 1], [True, False, False]) == 0.5
    assert area_under_curve([1, 2], [True, True]) is None


def test_the_interval_of_an_area_with_dependent_scores_by_hand() -> None:
    # Three questions with a right and a wrong answer each: the area is 7/9. The right answers are above 1, 2/3 and 2/3 of
    # the wrong ones, which are below 1, 1/3 and 1 of the right ones. Less 7/9, in ninths: 2, −1, −1 and 2, −4, 2.
    found = area_interval([3, 1, 2, 2.5, 1.5, 0], [True, False] * 3, "aabbcc")
    variance = 3 / 2 * (6 + 24 + 2 * (4 + 4 - 2)) / 81 / 9
    half = NormalDist().inv_cdf(0.975) * math.sqrt(variance) / (7 / 9 * 2 / 9)
    assert found == pytest.approx(tuple(1 / (1 + 2 / 7 * math.exp(-end)) for end in (-half, half)))


def test_the_interval_of_a_share_stays_within_what_a_share_can_be() -> None:
    # Two graded scores, 0 and 0.45: Student's t alone would give −2.63 … 3.08.
    assert rate_of([0.0, 0.45], 2, 0).interval == (0.0, 1.0)
    # What a game paid is not a share and is not cut.
    low, high = rate_of([-1.0, 2.0], 2, 0).interval or (0.0, 0.0)
    assert low < -1.0
    assert high > 2.0


# Scores of runs on two tasks. The numbers of the next test are rliable 1.2.0's: `aggregate_iqm`, `probability_of_improvement` and
# `get_interval_estimates` with 20,000 resamples.
SCORES = [0.10, 0.40, 0.35, 0.80, 0.55], [0.55, 0.60, 0.90, 0.20, 0.75]
OTHERS = [0.30, 0.20, 0.35, 0.15], [0.50, 0.60, 0.65, 0.10]


def test_aggregates_are_those_of_rliable() -> None:
    def mean(strata: Sequence[Sequence[float]]) -> float:
        return interquartile_mean([value for values in strata for value in values])

    def improved(strata: Sequence[Sequence[float]]) -> float:
        return probability_of_improvement(strata[:2], strata[2:])

    assert (mean(SCORES), mean(OTHERS)) == pytest.approx((0.5333333333333333, 0.3375))
    assert probability_of_improvement(SCORES, OTHERS) == pytest.approx(0.725)
    assert probability_of_improvement(OTHERS, SCORES) == pytest.approx(0.275)
    # Two bootstraps draw other resamples: their ends agree within the error of the draw.
    assert stratified_interval(SCORES, mean, seed=0) == pytest.approx((0.34166667, 0.7), abs=0.02)
    assert stratified_interval(OTHERS, mean, seed=0) == pytest.approx((0.175, 0.4625), abs=0.02)
    assert stratified_interval([*SCORES, *OTHERS], improved, seed=0) == pytest.approx((0.45, 0.95), abs=0.03)


def test_a_stratum_is_resampled_by_itself() -> None:
    # Within each task all runs score the same, so that the mean over the tasks cannot vary; resampled together it would.
    assert stratified_interval([[0.0] * 4, [1.0] * 4], lambda s: (sum(s[0]) + sum(s[1])) / 8, seed=3) == (
        0.5,
        0.5,
    )
    low, high = bootstrap_interval([0.0] * 4 + [1.0] * 4, seed=3)
    assert low < 0.3
    assert high > 0.7
