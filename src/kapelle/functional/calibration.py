"""Calibrate verifiers: map scores of a verifier to probabilities, fitted on answers on which the verifier was not trained.

The method `temperature` divides every score by one number (arXiv:1706.04599, section 4.2). The verifier becomes more or less
confident, but a score of 0 still maps to a probability of ½. The method `isotonic` fits an increasing step function (Zadrozny
and Elkan 2002), which is interpolated linearly. Isotonic calibration can also change the probability at a score of 0, which
helps if the training answers were balanced and the evaluated answers are not. For the fit, `isotonic` needs more answers than
`temperature`.

Both methods preserve the order of scores, but `isotonic` can create ties. This module uses only plain Python.
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
    """Return the sigmoid σ(score) without overflow."""
    return 0.5 + 0.5 * math.tanh(0.5 * score)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A mapping from scores to probabilities."""

    temperature: float = 1.0
    """The divisor of scores. This divisor is used if `points` is empty."""
    points: tuple[tuple[float, float], ...] = ()
    """Pairs (score, probability), in increasing order of both. The mapping is linear between two points and constant beyond
    the first and the last point."""

    def probability(self, score: float) -> float:
        """Return the probability that an answer with this score is correct."""
        if not self.points:
            return sigmoid(score / self.temperature)
        place = bisect_right(self.points, score, key=lambda point: point[0])
        if place in (0, len(self.points)):
            return self.points[min(place, len(self.points) - 1)][1]
        (left, low), (right, high) = self.points[place - 1], self.points[place]
        return low + (high - low) * (score - left) / (right - left)

    def row(self) -> dict[str, Any]:
        """Return the calibration as a JSON object."""
        if self.points:
            return {"kind": "isotonic", "points": [list(point) for point in self.points]}
        return {"kind": "temperature", "temperature": self.temperature}


UNCALIBRATED = Calibration()
"""The mapping of a verifier without calibration: the probability is σ(score)."""


def read_calibration(row: Mapping[str, Any] | None) -> Calibration:
    """Return the calibration from the result of `Calibration.row`, or σ for None.

    Raises KeyError, TypeError or ValueError for other values.
    """
    if row is None:
        return UNCALIBRATED
    if row["kind"] == "isotonic":
        return Calibration(points=tuple((float(score), float(share)) for score, share in row["points"]))
    return Calibration(float(row["temperature"]))


def fit_calibration(kind: Kind, scores: Sequence[float], right: Sequence[bool]) -> Calibration | None:
    """Return the calibration that fits the answers best.

    Return None if `kind` is `none`, or if all answers are correct or all are incorrect.
    """
    if kind == "none" or len(set(right)) < 2:
        return None
    if kind == "isotonic":
        return Calibration(points=_isotonic(scores, right))
    return Calibration(_temperature(scores, right))


COLDEST, HOTTEST = 0.05, 50.0
"""The minimum and maximum temperature. Without bounds, the temperature would be 0 for a perfect verifier and infinite for a
verifier at chance level."""


def _temperature(scores: Sequence[float], right: Sequence[bool]) -> float:
    """Return the temperature with the lowest cross-entropy. The cross-entropy is convex in the inverse temperature."""

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
    """Fit an increasing function by pooling adjacent violators.

    Return the two ends of each block, each with the block's share of correct answers.
    """
    ordered = sorted(zip(scores, right, strict=True))
    blocks: list[tuple[float, float, int, int]] = []  # first score, last score, correct answers, answers
    for score, equal in groupby(ordered, key=lambda each: each[0]):
        kinds = [kind for _, kind in equal]
        first, last, positive, count = score, score, sum(kinds), len(kinds)
        # Merge while the block below has at least this block's share of correct answers.
        while blocks and blocks[-1][2] * count >= positive * blocks[-1][3]:
            first, _, more, others = blocks.pop()
            positive, count = positive + more, count + others
        blocks.append((first, last, positive, count))
    # Avoid the probabilities 0 and 1: the next answer can be the first of the other kind.
    least = 0.5 / len(scores)
    return tuple(
        (end, min(1 - least, max(least, positive / count)))
        for first, last, positive, count in blocks
        for end in dict.fromkeys((first, last))
    )
