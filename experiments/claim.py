"""What a claim is: why a method should do better, in numbers that could turn out otherwise.

A claim lives in a file of `experiments/claims` as `CLAIM`. Its arms are run once for each seed, and `measure` returns what came of it;
a prediction is one number for each seed, a function of what all arms measured with that seed, and a bound. Over seeds it is summed up
by its interquartile mean with a 95 % bootstrap interval over seeds (Agarwal et al. 2021, 2108.13264; paired, since arms share seeds).
A prediction is *shown* if the whole interval keeps the bound, *contradicted* if the whole interval lies beyond `turned`, else *not shown*.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from kapelle.functional.statistics import probability_of_improvement

Verdict = Literal["shown", "not shown", "contradicted"]
Measures = Mapping[str, float]
"""What was measured of one arm with one seed, by name."""
Found = Mapping[str, Measures]
"""What was measured with one seed, by arm."""
Points = Sequence[tuple[float, float]]
"""Sampled tokens and the team's worth then."""


@dataclass(frozen=True)
class Result:
    """What one arm with one seed came to."""

    measures: Measures
    curve: Points = ()


Measure = Callable[[Any, int, float], Result]
"""(arm, seed, rate) → what came of it; deterministic."""


@dataclass(frozen=True)
class Prediction:
    """A number for each seed and the bound that it should keep."""

    says: str
    of: Callable[[Found], float]
    at_least: float | None = None
    at_most: float | None = None
    turned: float | None = None
    """Beyond it the contrary holds; the bound itself where nothing is given."""
    pair: tuple[str, str, str] | None = None
    """Two arms of which the first should be better by a measure, for the probability of improvement."""
    algorithms: tuple[str, ...] = ()
    """Whose pages count it; those of all the claim's algorithms where it names none."""

    def about(self, *algorithms: str) -> Prediction:
        """Return the prediction as one about these algorithms alone."""
        return replace(self, algorithms=algorithms)

    def judge(self, numbers: Sequence[float]) -> tuple[Verdict, float, float, float]:
        """Return the verdict, the interquartile mean and its interval."""
        middle, low, high = summed_up(numbers)
        if self.at_least is not None:
            limit = self.at_least if self.turned is None else self.turned
            kept, beyond = low >= self.at_least, high < limit
        else:
            assert self.at_most is not None, f"'{self.says}' has no bound"
            limit = self.at_most if self.turned is None else self.turned
            kept, beyond = high <= self.at_most, low > limit
        return ("shown" if kept else "contradicted" if beyond else "not shown"), middle, low, high

    def holds(self, number: float) -> bool:
        """Return whether a number keeps the bound."""
        return number >= self.at_least if self.at_least is not None else number <= (self.at_most or 0.0)


def better(one: str, other: str, by: float, measure: str = "area", says: str = "") -> Prediction:
    """Return the prediction that an arm's measure is greater than another's by so much; contradicted if it is smaller."""
    text = says or f"`{one}` exceeds `{other}` by at least {by:g} (`{measure}`)"
    return Prediction(
        text,
        lambda found: found[one][measure] - found[other][measure],
        at_least=by,
        turned=0.0,
        pair=(one, other, measure),
    )


@dataclass(frozen=True)
class Claim:
    """One claim, and the experiment that could have failed."""

    name: str
    algorithms: tuple[str, ...]
    """Whose pages tell of it."""
    claim: str
    """A sentence."""
    source: str
    arms: Mapping[str, Any]
    """Label → what `measure` understands."""
    measure: Measure
    predictions: tuple[Prediction, ...]
    setting: str
    """What is played, in a sentence or two."""
    rates: tuple[float, ...] = (1.0,)
    """Learning rates with which all arms begin; each arm takes the one with the greatest `chosen_by` (`running.run`). One rate is not chosen."""
    chosen_by: str = "area"
    seeds: int = 10
    one_run: bool = False
    """Whether all arms of a seed are measures of one run, which `measure` keeps: one process takes them in turn."""
    quick: int = 0
    """Seeds of the quick check; 0 leaves it out."""
    landmarks: Callable[[], Mapping[str, float]] = dict
    """What the best, chance and so on are worth."""
    plot: Literal["curves", "bars", "lines"] = "curves"
    """Worth over tokens; a measure of every arm; or of arms called `series @ x` over x."""
    plotted: tuple[str, str, str] = ("area", "", "")
    """For bars and lines: the measure, and what the axes say (x and y)."""
    logarithmic: bool = False
    remark: str = ""
    """What is to be known of the result, for the page: what was tried, why it is so, where it does not hold."""


def summed_up(numbers: Sequence[float]) -> tuple[float, float, float]:
    """Return the interquartile mean over seeds and its 95 % bootstrap interval."""
    values = np.asarray(numbers, dtype=np.float64)
    draws = np.random.default_rng(0).integers(len(values), size=(10_000, len(values)))
    middles = interquartile_mean(values[draws])
    finite = bool(np.isfinite(middles).all())  # nothing lies between infinities
    low, high = np.quantile(middles, (0.025, 0.975), method="linear" if finite else "inverted_cdf")
    return float(interquartile_mean(values)), float(low), float(high)


def interquartile_mean(values: Any) -> Any:
    """Return the mean of the middle half along the last axis, of `n` values without ⌊n/4⌋ at either end."""
    ordered = np.sort(values, axis=-1)
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(-1)


def claims() -> dict[str, Claim]:
    """Return all claims by name."""
    from experiments import claims as folder

    found = (
        importlib.import_module(f"experiments.claims.{module.name}").CLAIM
        for module in sorted(pkgutil.iter_modules(folder.__path__), key=lambda one: one.name)
    )
    return {claim.name: claim for claim in found}


@dataclass(frozen=True)
class Judged:
    """A prediction and what came of it."""

    says: str
    verdict: Verdict
    middle: float
    low: float
    high: float
    bound: str
    improvement: float | None = None
    """Chance that a run of the first arm is better than one of the second; None where no two arms are compared."""
    algorithms: tuple[str, ...] = ()
    """Whose pages count it; empty for all."""


@dataclass
class Results:
    """All that is known of a claim, as it is kept."""

    name: str
    seeds: int
    rates: dict[str, float]
    """The rate of each arm."""
    tried: dict[str, dict[str, float]]
    """Arm → rate → what it was chosen by."""
    runs: dict[str, list[dict[str, float]]]
    """Arm → measures by seed."""
    curves: dict[str, list[list[float]]] = field(default_factory=dict)
    """Arm → tokens, interquartile mean of the worth, and its interval."""
    seconds: float = 0.0
    """CPU-seconds of all runs."""
    arms: dict[str, Any] = field(default_factory=dict)
    """Arm → its settings."""
    source: str = ""
    """Hash of the claim's file (`running.source_of`)."""
    versions: dict[str, str] = field(default_factory=dict)
    sweep: int = 3
    """Seeds by which rates were chosen; three, from a list that was not extended, in results that say nothing."""

    def judge(self, claim: Claim) -> list[Judged]:
        """Return what came of every prediction."""
        found = []
        for prediction in claim.predictions:
            numbers = self.numbers(prediction)
            verdict, middle, low, high = prediction.judge(numbers)
            bound = (
                f"≥ {prediction.at_least:g}"
                if prediction.at_least is not None
                else f"≤ {prediction.at_most:g}"
            )
            if prediction.turned is not None:
                bound += f" ({prediction.turned:g})"
            improvement = None
            if prediction.pair is not None:
                one, other, measure = prediction.pair
                ours, theirs = ([row[measure] for row in self.runs[arm]] for arm in (one, other))
                improvement = probability_of_improvement([ours], [theirs])
            found.append(
                Judged(prediction.says, verdict, middle, low, high, bound, improvement, prediction.algorithms)
            )
        return found

    def numbers(self, prediction: Prediction) -> list[float]:
        """Return a prediction's number for every seed."""
        count = min(len(rows) for rows in self.runs.values())
        return [prediction.of({arm: rows[k] for arm, rows in self.runs.items()}) for k in range(count)]


def overall(judged: Sequence[Judged], algorithm: str | None = None) -> Verdict:
    """Return a claim's verdict: shown if all its predictions are, contradicted if one is; or that of those about an algorithm."""
    verdicts = {
        each.verdict
        for each in judged
        if algorithm is None or not each.algorithms or algorithm in each.algorithms
    }
    if verdicts == {"shown"}:
        return "shown"
    return "contradicted" if "contradicted" in verdicts else "not shown"


def confirmed(first: Sequence[Judged], repeated: Sequence[Judged]) -> list[Judged]:
    """Return the first run's predictions, not shown where the repetition came to another verdict."""
    return [
        one if one.verdict == again.verdict else replace(one, verdict="not shown")
        for one, again in zip(first, repeated, strict=True)
    ]
