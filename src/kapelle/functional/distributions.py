"""Compute histograms of the values of a step. Histograms have a bounded size, and their bins can be merged across steps.

A bin is an interval [k·2^e, (k + 1)·2^e) with integers k and e, so two neighbouring bins can form a bin of twice the width.
Each histogram has the smallest bin width that fits. Histograms of different steps can be converted to a common bin width
exactly, by adding counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

BINS = 32
"""The maximum number of bins of a histogram."""
FINEST = -20
"""The minimum exponent of a bin width. The smallest bin width is 2^-20, which is about 1e-6."""
KINDS: Mapping[str, tuple[str, str, str]] = {
    "reward": ("reward of an episode from the environment, by agent", "reward", "Before the algorithm shares rewards. Two stripes: correct and incorrect. One stripe: all episodes have equal rewards."),
    "advantage": ("advantage of a token, by agent", "reward", "Advantage of each trained token. One stripe at 0: nothing is learned."),
    "length": ("tokens of a completion, by agent", "tokens", "A stripe at the top is the token limit: completions are truncated there."),
    "surprisal": ("−log p of a sampled token, by policy", "nats", "Negative log-prob of each sampled token under the sampler; its mean estimates the entropy. A second stripe at high values indicates noise in the text."),
    "update_entropy": ("entropy at a trained token, by policy", "nats", "Entropy of the distribution at each token during the update, over all turns and passes. A stripe at 0: the policy is certain of these tokens."),
    "update_log_ratio": ("log importance ratio of a token in the loss, by policy", "nats", "Log of the ratio of each token's probability under the training weights to that under the sampling weights, over all turns and passes. One stripe at 0: one pass over the samples. PPO clips beyond ±0.2."),
    "entropy": ("entropy at a token, in episodes with recorded credit", "nats", "Entropy of the distribution at each token under the updated weights, in the best and worst episodes (`record.credit_episodes`)."),
    "log_ratio": ("log importance ratio of a token, in episodes with recorded credit", "nats", "Log of the factor by which the update has changed each token's probability, in the best and worst episodes. PPO clips beyond ±0.2."),
}  # fmt: skip
"""Descriptions of the recorded distributions. The key is the part of the metric name before the slash; the value is a tuple
of what is counted, its unit and how to interpret it."""
TRACED = ("entropy", "log_ratio")
"""The distributions that are recorded only for traced episodes, because they need a pass with the updated weights."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram: the counts of values in consecutive bins of equal width."""

    exponent: int
    """The exponent e of the bin width 2^e."""
    first: int
    """The number k of the first bin, which begins at k·2^e."""
    counts: tuple[int, ...]

    def row(self) -> list[Any]:
        """Return the histogram as a list that can be stored as JSON."""
        return [self.exponent, self.first, list(self.counts)]

    def at(self, exponent: int) -> dict[int, int]:
        """Return the counts in bins of width 2^exponent, as a mapping from bin numbers k to counts.

        The width must not be smaller than that of the histogram.
        """
        shift = exponent - self.exponent
        assert shift >= 0, "bins can be joined, not split"
        found: Counter[int] = Counter()
        for place, count in enumerate(self.counts):
            if count:
                found[(self.first + place) >> shift] += count
        return found


def histogram(values: ArrayLike, finest: int = FINEST) -> Histogram | None:
    """Return the histogram of the finite values with the smallest bin width (at least 2^finest) that needs at most `BINS` bins.

    Returns None if there are no finite values.
    """
    import numpy as np  # not needed for reading histograms

    known = np.asarray(values, np.float64)
    known = known[np.isfinite(known)]
    if not known.size:
        return None
    low, high = float(known.min()), float(known.max())
    exponent = finest
    if high > low:
        # `frexp` avoids the overflow of a quotient of extreme values.
        exponent = max(finest, math.frexp(high / BINS - low / BINS)[1] - 1)
    while _place(high, exponent) - _place(low, exponent) >= BINS:
        exponent += 1
    first = _place(low, exponent)
    places = (np.floor(np.ldexp(known, -exponent)) - first).astype(np.int64)
    return Histogram(exponent, first, tuple(np.bincount(places).tolist()))


def _place(value: float, exponent: int) -> int:
    return math.floor(math.ldexp(value, -exponent))


def read_histogram(value: object) -> Histogram | None:
    """Return the histogram from the result of `Histogram.row`, or None for other values."""
    if not isinstance(value, list) or len(value) != 3:
        return None
    exponent, first, counts = value
    if not (isinstance(counts, list) and 0 < len(counts) <= BINS):
        return None
    if not all(type(number) is int for number in (exponent, first, *counts)) or min(counts) < 0:
        return None
    return Histogram(exponent, first, tuple(counts)) if abs(exponent) < 1100 and abs(first) < 2**62 else None


def added(histograms: Sequence[Histogram]) -> Histogram:
    """Return the sum of several histograms."""
    total = stacked([histograms], BINS)
    assert total is not None, "at least one histogram is given"
    return Histogram(total.exponent, total.first, total.rows[0])


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Histograms of consecutive ranges of steps, with common bins."""

    exponent: int
    first: int
    rows: tuple[tuple[int, ...], ...]
    """The counts of all bins for each range of steps."""


def stacked(stretches: Sequence[Sequence[Histogram]], most: int = 48) -> HeatMap | None:
    """Return the sum of the histograms of each range of steps, with at most `most` common bins.

    Return None if there are no histograms.
    """
    histograms = [each for stretch in stretches for each in stretch]
    if not histograms:
        return None
    exponent = max(each.exponent for each in histograms)
    while True:
        first = min(each.first >> exponent - each.exponent for each in histograms)
        last = max((each.first + len(each.counts) - 1) >> exponent - each.exponent for each in histograms)
        if last - first < most:
            break
        exponent += 1
    rows = []
    for stretch in stretches:
        row = [0] * (last - first + 1)
        for each in stretch:
            for k, count in each.at(exponent).items():
                row[k - first] += count
        rows.append(tuple(row))
    return HeatMap(exponent, first, tuple(rows))
