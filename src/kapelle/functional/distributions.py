"""How the numbers of a step are distributed: histograms of bounded size whose bins fit into one another.

A bin is [k·2^e, (k + 1)·2^e) for whole k and e. Two neighbours of one width are one bin of twice the width, so that
histograms of different steps, which each chose the least width that fits, are brought to one width by adding counts,
exactly and without the values.
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
"""Most bins of a step's histogram."""
FINEST = -20
"""Least exponent: values closer than 2^-20, about 1e-6, are alike."""
KINDS: Mapping[str, tuple[str, str, str]] = {
    "reward": ("what the environment paid in an episode, by agent", "reward", "Before the algorithm shares it. Two stripes: right and wrong; one stripe: every attempt earns the same."),
    "advantage": ("advantage of a token, by agent", "reward", "What each token that was trained on was credited with. One stripe at 0: nothing is learned."),
    "length": ("tokens of a completion, by agent", "tokens", "A stripe at the top is the limit of tokens: answers are cut off there."),
    "surprisal": ("−log p of a sampled token, by policy", "nats", "How unlikely each sampled token was to the sampler; its mean is an estimate of the entropy. A second stripe far up is noise among the text."),
    "update_entropy": ("entropy of a token that is trained on, by policy", "nats", "Entropy of the distribution at each token as the passes of the update have it, of all turns; where a step is learned from several times, each time counts. A stripe at 0 is what the policy is certain of."),
    "update_log_ratio": ("log importance ratio of a token in the loss, by policy", "nats", "Log of how many times more likely each token was to the weights that learned from it than to those that sampled it, of all turns and passes. One stripe at 0: tokens are learned from once. Beyond ±0.2 the clip range of PPO begins."),
    "entropy": ("entropy of a token, of the episodes whose credit is kept", "nats", "Entropy of the distribution at each token with the updated weights, in the best and worst episodes (`record.credit_episodes`)."),
    "log_ratio": ("log importance ratio of a token, of the episodes whose credit is kept", "nats", "Log of how many times more likely the update has made each token, in the best and worst episodes. Beyond ±0.2 the clip range of PPO begins."),
}  # fmt: skip
"""What is recorded: the part of a name before the slash → what it is of, its unit and what to see in it."""
TRACED = ("entropy", "log_ratio")
"""Those of traced episodes alone: they need a pass over the tokens with the updated weights."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values in neighbouring bins of one width."""

    exponent: int
    """The width is 2^exponent."""
    first: int
    """k of the first bin: it begins at k·2^exponent."""
    counts: tuple[int, ...]

    def row(self) -> list[Any]:
        """Return it as JSON."""
        return [self.exponent, self.first, list(self.counts)]

    def at(self, exponent: int) -> dict[int, int]:
        """Return the counts by k in bins of a width that is as large or larger."""
        shift = exponent - self.exponent
        assert shift >= 0, "bins can be joined, not split"
        found: Counter[int] = Counter()
        for place, count in enumerate(self.counts):
            if count:
                found[(self.first + place) >> shift] += count
        return found


def histogram(values: ArrayLike, finest: int = FINEST) -> Histogram | None:
    """Return the histogram of the finite values with the least width, 2^finest or more, that takes at most `BINS` bins; None without any."""
    import numpy as np  # whoever only reads histograms needs none

    known = np.asarray(values, np.float64)  # a step may have a million tokens
    known = known[np.isfinite(known)]
    if not known.size:
        return None
    low, high = float(known.min()), float(known.max())
    exponent = finest
    if high > low:
        # `frexp` cannot overflow as a quotient of extreme values could.
        exponent = max(finest, math.frexp(high / BINS - low / BINS)[1] - 1)
    while _place(high, exponent) - _place(low, exponent) >= BINS:
        exponent += 1
    first = _place(low, exponent)
    places = (np.floor(np.ldexp(known, -exponent)) - first).astype(np.int64)
    return Histogram(exponent, first, tuple(np.bincount(places).tolist()))


def _place(value: float, exponent: int) -> int:
    return math.floor(math.ldexp(value, -exponent))


def read_histogram(value: object) -> Histogram | None:
    """Return the histogram that `Histogram.row` has written; None for anything else."""
    if not isinstance(value, list) or len(value) != 3:
        return None
    exponent, first, counts = value
    if not (isinstance(counts, list) and 0 < len(counts) <= BINS):
        return None
    if not all(type(number) is int for number in (exponent, first, *counts)) or min(counts) < 0:
        return None
    return Histogram(exponent, first, tuple(counts)) if abs(exponent) < 1100 and abs(first) < 2**62 else None


def added(histograms: Sequence[Histogram]) -> Histogram:
    """Return the histogram of the values of several: the one that all of them together would have."""
    every = stacked([histograms], BINS)
    assert every is not None, "there is something to add"
    return Histogram(every.exponent, every.first, every.rows[0])


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Histograms of stretches of steps in common bins."""

    exponent: int
    first: int
    rows: tuple[tuple[int, ...], ...]
    """For each stretch the counts of all bins."""


def stacked(stretches: Sequence[Sequence[Histogram]], most: int = 48) -> HeatMap | None:
    """Return the histograms of each stretch of steps added up, in at most `most` common bins; None without any."""
    every = [each for stretch in stretches for each in stretch]
    if not every:
        return None
    exponent = max(each.exponent for each in every)
    while True:
        ends = [((each.first >> exponent - each.exponent), (each.first + len(each.counts) - 1) >> exponent - each.exponent) for each in every]  # fmt: skip
        first, last = min(low for low, _ in ends), max(high for _, high in ends)
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
