"""From scores to probabilities: what a judge's score means is learned from answers that it was not trained on.

`temperature` divides every score by one number (1706.04599, §4.2): it makes a judge more or less sure, and 0 stays ½.
`isotonic` is the rising step function that fits best (Zadrozny and Elkan 2002), joined by straight lines: it also moves ½,
which a judge needs that was trained on balanced answers and judges others, and it takes more answers to fit.

Both keep the order of scores, so no area under a curve gets worse; isotonic may make neighbours equal. Plain Python.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

Kind = Literal["none", "temperature", "isotonic"]


def sigmoid(score: float) -> float:
    """Return σ(score), without overflow."""
    return 0.5 + 0.5 * math.tanh(0.5 * score)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The probability that a score stands for."""

    temperature: float = 1.0
    """What scores are divided by where there are no `points`."""
    points: tuple[tuple[float, float], ...] = ()
    """(score, probability), rising in both: the probability is linear between them, and constant beyond the outer ones."""

    def probability(self, score: float) -> float:
        """Return the probability that an answer with this score is right."""
        if not self.points:
            return sigmoid(score / self.temperature)
        place = bisect_right(self.points, score, key=lambda point: point[0])
        if place in (0, len(self.points)):
            return self.points[min(place, len(self.points) - 1)][1]
        (left, low), (right, high) = self.points[place - 1], self.points[place]
        return low + (high - low) * (score - left) / (right - left)

    def row(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        if self.points:
            return {"kind": "isotonic", "points": [list(point) for point in self.points]}
        return {"kind": "temperature", "temperature": self.temperature}


UNCALIBRATED = Calibration()
"""σ of the score."""


def read_calibration(row: Mapping[str, Any] | None) -> Calibration:
    """Return what `Calibration.row` wrote; None is σ itself. Raises KeyError, TypeError or ValueError for anything else."""
    if row is None:
        return UNCALIBRATED
    if row["kind"] == "isotonic":
        return Calibration(points=tuple((float(score), float(share)) for score, share in row["points"]))
    return Calibration(float(row["temperature"]))


def fit_calibration(kind: Kind, scores: Sequence[float], right: Sequence[bool]) -> Calibration | None:
    """Return what fits best the share of right answers; None where it cannot be known: all are of one kind, or `none`."""
    if kind == "none" or len(set(right)) < 2:
        return None
    if kind == "isotonic":
        return Calibration(points=_isotonic(scores, right))
    return Calibration(_temperature(scores, right))


COLDEST, HOTTEST = 0.05, 50.0
"""Bounds of a temperature: one that fits a judge without a mistake would be 0, and one at chance has none."""


def _temperature(scores: Sequence[float], right: Sequence[bool]) -> float:
    """Return the temperature with the least cross-entropy, which is convex in its inverse."""

    def slope(inverse: float) -> float:
        return sum(
            score * (sigmoid(inverse * score) - each) for score, each in zip(scores, right, strict=True)
        )

    low, high = 1 / HOTTEST, 1 / COLDEST
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 2 / (low + high)


def _isotonic(scores: Sequence[float], right: Sequence[bool]) -> tuple[tuple[float, float], ...]:
    """Return the ends of the blocks that pooling of adjacent violators leaves, each with the block's share of right ones."""
    ordered = sorted(zip(scores, right, strict=True))
    blocks: list[tuple[float, float, int, int]] = []  # first score, last score, right ones, answers
    for score, equal in groupby(ordered, key=lambda each: each[0]):
        kinds = [kind for _, kind in equal]
        first, last, positive, count = score, score, sum(kinds), len(kinds)
        while (
            blocks and blocks[-1][2] * count >= positive * blocks[-1][3]
        ):  # no more right ones above than below
            first, _, more, others = blocks.pop()
            positive, count = positive + more, count + others
        blocks.append((first, last, positive, count))
    # Never quite 0 or 1: the next answer may be the first of the other kind.
    least = 0.5 / len(scores)
    return tuple(
        (end, min(1 - least, max(least, positive / count)))
        for first, last, positive, count in blocks
        for end in dict.fromkeys((first, last))
    )
