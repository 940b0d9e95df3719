"""Compute confidence intervals for shares and means, and robust summaries over seeds.

This module uses only plain Python, is accurate to six digits, and gives the same results on every machine.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, quantiles, stdev

Interval = tuple[float, float]
"""The lower and the upper end of an interval."""


def finite(value: object) -> float | None:
    """Return a value of a user's function as a float, or None if the value is not a single finite number."""
    try:
        found = float(value)  # type: ignore[arg-type]
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ):  # torch raises RuntimeError for several numbers
        return None
    return found if math.isfinite(found) else None


@dataclass(frozen=True, slots=True)
class MeanScore:
    """A mean score, with the number of episodes over which it was computed.

    The mean is taken over the `scored` episodes, which ended without an error and were scored by the environment. Episodes
    that failed or could not be scored count only in `played`.
    """

    value: float | None
    """The mean score, or None if no episode was scored."""
    interval: Interval | None
    """The 95 % confidence interval over the scored episodes."""
    scored: int
    played: int
    failed: int
    """The number of episodes that ended in an error."""
    reason: str = ""
    """The most frequent reason why episodes failed or were not scored. The string is empty if all episodes were scored."""
    fewer: str = ""
    """The reason why fewer episodes than requested were run, for example `50 requested, its test split has 26`. The string is
    empty if all were run."""
    stderr: float | None = None
    """The standard error of `value`: the sample standard deviation divided by the square root of the number of scores. The
    value is None if there are fewer than two scores."""

    def __str__(self) -> str:
        """Return a string such as `54.2 % [49.8, 58.5], scored 500 of 500`, with the number and reason of failures if there are any."""
        return f"{share_text(self.value, self.interval)}, {self.counts()}{f': {self.reason}' if self.reason else ''}"

    def counts(self, what: str = "") -> str:
        """Return a string such as `scored 3 of 16, 13 failed`.

        The string `what` (for example ` problems`) is inserted after the total.
        """
        return f"scored {self.scored} of {self.played}{what}{missing_text(self.failed, self.fewer)}"


def missing_text(failed: int, fewer: str) -> str:
    """Return a remark that follows a number of episodes, for example ` (50 requested, its test split has 26), 2 failed`.

    The remark can be empty.
    """
    return f"{f' ({fewer})' if fewer else ''}{f', {failed} failed' if failed else ''}"


def rate_of(scores: Sequence[float], played: int, failed: int, reason: str = "") -> MeanScore:
    """Return the mean of the given scores. The interval is Wilson's if all scores are 0 or 1, and Student's t otherwise.

    The interval is clipped to [0, 1] if all scores are in [0, 1].
    """
    if not scores:
        return MeanScore(None, None, 0, played, failed, reason)
    if all(score in (0.0, 1.0) for score in scores):
        interval: Interval | None = wilson_interval(int(sum(scores)), len(scores))
    else:
        interval = mean_interval(scores)
        if interval is not None and all(0.0 <= score <= 1.0 for score in scores):
            interval = max(0.0, interval[0]), min(1.0, interval[1])
    error = stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None
    return MeanScore(sum(scores) / len(scores), interval, len(scores), played, failed, reason, stderr=error)


def share_text(share: float | None, interval: Interval | None) -> str:
    """Return a share with its interval as a string such as `54.2 % [49.8, 58.5]`, or `no score` if the share is None."""
    if share is None:
        return "no score"
    ends = f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]" if interval else ""
    return f"{100 * share:.1f} %{ends}"


def wilson_interval(successes: int, total: int, confidence: float = 0.95) -> Interval:
    """Return Wilson's score interval for a share (Wilson 1927).

    Unlike the normal approximation, Wilson's interval stays inside [0, 1] and keeps its coverage near 0 and 1. If `total` is
    0, the interval is (0, 1).
    """
    assert 0 <= successes <= total, "successes are a part of the total"
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / total
    shrink = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == total else centre + half
    return low, high


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Return Student's t interval for the mean of independent values, or None if there are fewer than two values."""
    if len(values) < 2:
        return None
    half = t_quantile((1 + confidence) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    centre = fmean(values)
    return centre - half, centre + half


def area_under_curve(scores: Sequence[float], positive: Sequence[bool]) -> float | None:
    """Return the probability that a positive scores higher than a negative. Ties count as one half.

    This probability is the area under the receiver operating characteristic (Hanley and McNeil 1982). Returns None if there
    are no positives or no negatives.
    """
    yes = [score for score, flag in zip(scores, positive, strict=True) if flag]
    no = sorted(score for score, flag in zip(scores, positive, strict=True) if not flag)
    won = sum(bisect_left(no, score) + bisect_right(no, score) for score in yes) / 2
    return won / (len(yes) * len(no)) if yes and no else None


def area_interval(
    scores: Sequence[float], positive: Sequence[bool], cluster: Sequence[Hashable], confidence: float = 0.95
) -> Interval | None:
    """Return the confidence interval of the area under the curve for scores that are dependent within clusters.

    The variance is Obuchowski's for clustered data (1997, Biometrics 53), which equals DeLong's variance if every cluster
    contains one score. The interval is computed on the log-odds scale, so it stays inside [0, 1]. For an area of 0 or 1,
    Wilson's interval over the clusters is returned. Returns None unless at least two clusters have positives and at least two
    have negatives.
    """
    area = area_under_curve(scores, positive)
    sums: dict[Hashable, list[float]] = {}
    yes = sorted(score for score, flag in zip(scores, positive, strict=True) if flag)
    no = sorted(score for score, flag in zip(scores, positive, strict=True) if not flag)
    for score, flag, name in zip(scores, positive, cluster, strict=True):
        won, lost, right, wrong = sums.setdefault(name, [0.0, 0.0, 0.0, 0.0])
        below = _share_below(no, score) if flag else 1 - _share_below(yes, score)
        sums[name] = [won + below * flag, lost + below * (not flag), right + flag, wrong + (not flag)]
    both = (sum(row[2] > 0 for row in sums.values()), sum(row[3] > 0 for row in sums.values()))
    if area is None or min(both) < 2:
        return None
    if area in (0.0, 1.0):
        return wilson_interval(round(area * min(both)), min(both), confidence)
    above = [(won - right * area, lost - wrong * area) for won, lost, right, wrong in sums.values()]
    variance = (
        both[0] / (both[0] - 1) * sum(a * a for a, _ in above) / len(yes) ** 2
        + both[1] / (both[1] - 1) * sum(b * b for _, b in above) / len(no) ** 2
        + 2 * len(above) / (len(above) - 1) * sum(a * b for a, b in above) / (len(yes) * len(no))
    )
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    half = z * math.sqrt(max(0.0, variance)) / (area * (1 - area))
    centre = math.log(area / (1 - area))
    return 1 / (1 + math.exp(half - centre)), 1 / (1 + math.exp(-half - centre))


def _share_below(ordered: Sequence[float], value: float) -> float:
    """Return the share of the ordered values that are below a value. Equal values count as one half."""
    return (
        (bisect_left(ordered, value) + bisect_right(ordered, value)) / (2 * len(ordered)) if ordered else 0.0
    )


def bootstrap_interval(
    values: Sequence[float],
    seed: int,
    statistic: Callable[[Sequence[float]], float] = fmean,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """Return the percentile bootstrap interval of a statistic (Efron 1979). Equal seeds give equal intervals.

    The bootstrap does not assume normality, but its interval is too narrow for fewer than about ten values; use
    `mean_interval` for so few values.
    """
    assert values, "a bootstrap needs a value"
    return stratified_interval([values], lambda drawn: statistic(drawn[0]), seed, confidence, resamples)


def stratified_interval(
    strata: Sequence[Sequence[float]],
    statistic: Callable[[Sequence[Sequence[float]]], float],
    seed: int,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """Return the percentile bootstrap interval of a statistic of several samples (strata), each of which is resampled separately.

    For runs on several tasks, each task is a stratum, so every resample has the same number of runs per task
    (arXiv:2108.13264, section 4).
    """
    assert all(strata), "each stratum needs a value"
    generator = random.Random(seed)
    drawn = sorted(
        statistic([generator.choices(values, k=len(values)) for values in strata]) for _ in range(resamples)
    )
    tail = (1 - confidence) / 2
    return _quantile(drawn, tail), _quantile(drawn, 1 - tail)


def probability_of_improvement(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Return the probability that a run of `ours` scores higher than a run of `theirs` on a random task (arXiv:2108.13264).

    Ties count as one half. `ours[k]` and `theirs[k]` are the scores of the runs on task k. The probability on one task is
    Mann and Whitney's U divided by the number of pairs.
    """
    areas = [
        area_under_curve([*one, *other], [True] * len(one) + [False] * len(other))
        for one, other in zip(ours, theirs, strict=True)
    ]
    known = [area for area in areas if area is not None]
    assert 0 < len(known) == len(areas), "each task needs runs of both"
    return fmean(known)


def interquartile_mean(values: Sequence[float]) -> float:
    """Return the interquartile mean: the mean without the lowest and the highest quarter of the values (arXiv:2108.13264).

    A quarter is rounded down to a whole number of values. For fewer than four values, the result is their plain mean.
    """
    assert values, "a mean needs a value"
    cut = len(values) // 4
    return fmean(sorted(values)[cut : len(values) - cut])


@dataclass(frozen=True, slots=True)
class Quartiles:
    """The median and the quartiles of several values, for example over the seeds of one setting."""

    low: float
    """The first quartile."""
    median: float
    high: float
    """The third quartile."""


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the median and the quartiles, interpolated linearly between the ordered values."""
    assert values, "quartiles need a value"
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Quartiles(low, median(values), high)


def t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution for a probability in (0.5, 1) and an integer number of degrees of freedom."""
    assert 0.5 < probability < 1, (
        "the probability must be in the upper half, because the lower half mirrors it"
    )
    assert freedom >= 1, "at least one degree of freedom"
    if freedom > 200:
        return _t_quantile_expanded(probability, freedom)
    inside = 2 * probability - 1
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_inside(middle, freedom) < inside else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _t_inside(angle: float, freedom: int) -> float:
    """Return P(|T| < √freedom · tan(angle)), computed by the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    series = math.sin(angle) * total
    return 2 / math.pi * (angle + series) if odd else series


def _t_quantile_expanded(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t by its expansion around the normal quantile (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def merge_rows(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of several updates as one row: the maximum of `parity/max`, and the mean of every other metric."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        merged[name] = max(values) if name == "parity/max" else sum(values) / len(values)
    return merged
