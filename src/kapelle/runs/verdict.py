"""Gives a one-word verdict on the health of a run, based only on its metrics, with the numbers that support it.

    healthy      the signal rises, or success is already near 1
    flat         the signal does not rise, and the run is long enough to show that
    diverging    the signal falls, or the policy becomes noise
    collapsing   almost only one answer is sampled, and success does not rise
    hacked       the return rises while success falls
    memorising   success on unseen problems falls while success in training does not
    failing      more than a fifth of the episodes end in an error
    starved      no completion has received a reward, or almost all groups are dead, so that there is no gradient
    unrated      the metrics do not show progress: agents win what others lose, or nothing is scored
    young        too few steps, or too much noise, for any other verdict

**The signal** is `success` or, if there is no success, the mean return (`return/…`, otherwise `reward/…`). For
supervised steps, the signal is the share of pairs that are ranked correctly, or minus the nats per token. For
distillation, the signal is minus the divergence from the teacher. For a verifier, the signal is the AUC, or the share
of answers that are judged correctly. Only runs that learn from the rewards of episodes that they sample can be
*collapsing* or *starved*. In games in which one agent wins what other agents lose, returns do not show progress. The
signal is then the metric of a feature that shows progress (`Metric.progress`), if there is one.

**Noise** σ of a step is estimated from the differences between neighbouring steps (von Neumann 1941, successive
differences), on which a trend has little influence. For success, the two largest differences are excluded, because a
collapse would cause such differences. In addition, σ is at least the sampling noise of n scored episodes, sqrt(p(1 −
p)/n). Two stretches of a and b steps differ if z = difference / (σ·sqrt(1/a + 1/b)) is large.

**Rules.** A stretch is a fifth of the steps (at least 3 and at most 20). The first and the last stretch are called
`first` and `last`. Most thresholds are defined in `docs/algorithms/metrics.md`. All other thresholds are stated below,
and were chosen so that no normal run in the tests is classified as faulty.
- *rises*: The signal increases with z ≥ 3, from the first to the last stretch or from the first to the last third.
- *diverging*: The last stretch of the signal is below the best stretch with z ≥ 4, and the decrease is sufficiently
  large. For success, the decrease must exceed 0.1, or 0.05 if success falls to less than half. For returns, the last
  stretch must be below the first stretch with z ≥ 3, or more than half of the gain from the first to the best stretch
  must be lost. A single low step is not sufficient, because the median of the last stretch must be as low as its mean.
  A decrease of success to no less than half is ignored if success on unseen problems, measured after the decrease
  began, is as high as ever (because the tasks have become harder), or if the return increases (*hacked*). A run is also
  diverging if entropy is more than twice its first value, and more than 1 nat above it, while nothing rises. A third
  reason is a KL divergence above 1 nat per token, or a gradient norm above 10, that is ten times its first value (above
  10 and 100 while success rises). A fourth reason is that updates were undone or skipped in a tenth of the steps of the
  last third.
- *failing*: More than 0.2 of the episodes of the last third ended with an error.
- *collapsing*: Entropy is a tenth of its first value and below 0.05 nats, while the signal does not rise in the second
  half and success is below 0.9 (or returns that rose are below 0.9 of the highest value of `reward_max`). The remaining
  entropy bounds the possible gain (arXiv:2505.22617), and GRPO loses entropy early (arXiv:2503.14476).
- *A decrease on unseen problems*: The last evaluation is below the best evaluation, and their 95 % intervals do not
  overlap. The intervals are widened because the best of several evaluations is chosen (Bonferroni). The verdict is
  *memorising* if success in training rises in between (z ≥ 2), and *hacked* if the mean return rises. A decrease of at
  least 0.05 is always a problem. The verdict is then *diverging* if success in training is unknown or also falls (z ≥ 3,
  and by half as much or to half), and otherwise *memorising*. Figure 1 of arXiv:2210.10760 shows a proxy reward that
  rises while the true reward falls.
- *hacked* without evaluations: The return rises and success in training falls, each with z ≥ 3.
- *starved*: Every completion of every step had the same reward, this reward is not positive, and there is no reward
  model or verifier. A run is also starved if the mean of `dead_groups` in the last third is at least 0.9, success (or
  returns, as above) is below 0.95 and there is no critic. Groups of episodes with equal returns have no gradient
  (arXiv:2503.14476, section 3.2).
- *flat*: There are at least 20 steps, nothing rises, and the upper end of the 95 % interval excludes a rise of 0.1 (for
  returns, a rise of σ).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from statistics import NormalDist, fmean, median
from typing import Any, Literal, TypeGuard

from kapelle.runs.definitions import progress_metrics

Word = Literal[
    "healthy",
    "flat",
    "diverging",
    "failing",
    "collapsing",
    "hacked",
    "memorising",
    "starved",
    "unrated",
    "young",
]
Column = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class WhatToDo:
    """The meaning of a verdict, and how to respond to it."""

    meaning: str
    remedy: str
    page: str
    """A page of the documentation."""


ADVICE: Mapping[Word, WhatToDo] = {
    word: WhatToDo(**about)  # type: ignore[misc]
    for word, about in tomllib.loads((files("kapelle.runs") / "advice.toml").read_text("utf-8")).items()
}
"""The advice for every verdict. Causes come before their consequences, and the first rule that applies determines the verdict of a run."""
FAULTS: tuple[Word, ...] = ("diverging", "failing", "collapsing", "hacked", "memorising", "starved", "flat")


@dataclass(frozen=True, slots=True)
class Evidence:
    """A sentence with the numbers that support a verdict."""

    word: Word
    sentence: str
    panel: str
    """The family of metrics whose panel shows the curve."""
    step: int = 0
    """The step at which the problem begins, or 0 if it concerns the whole run."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The health of a run in one word."""

    word: Word
    evidence: tuple[Evidence, ...]
    """The evidence for this verdict, followed by the evidence for other verdicts."""

    @property
    def advice(self) -> WhatToDo:
        """The meaning of the verdict, and how to respond to it."""
        return ADVICE[self.word]

    @property
    def at_fault(self) -> bool:
        """Whether something should be changed before the run continues."""
        return self.word in FAULTS

    def row(self) -> dict[str, Any]:
        """Return the verdict as plain JSON values."""
        evidence = [
            {"verdict": each.word, "sentence": each.sentence, "metric": each.panel, "step": each.step}
            for each in self.evidence
        ]
        return {
            "verdict": self.word,
            "evidence": evidence,
            "remedy": self.advice.remedy,
            "page": self.advice.page,
        }

    def lines(self) -> list[str]:
        """Return the verdict as lines of text, which contain the word, its evidence and, for a problem, what to do."""
        first, *others = self.evidence
        found = [f"{self.word}: {first.sentence}", *(f"{each.word}: {each.sentence}" for each in others)]
        return (
            [*found, f"what to do: {self.advice.remedy} See {self.advice.page}."] if self.at_fault else found
        )


WORDS = {
    "nll": "nats per token",
    "preference_accuracy": "the share of pairs ranked correctly",
    "return": "the mean return",
    "reward": "the mean reward",
    "teacher_kl": "the divergence from the teacher",
    "verifier_accuracy": "the share of answers judged correctly",
    "verifier_auc": "the verifier's AUC",
    **{name: metric.progress for name, metric in progress_metrics().items()},
}
"""Phrases for the signals in sentences. All other signals are referred to by their own name."""
FALLING = ("nll", "teacher_kl", *(name for name, metric in progress_metrics().items() if metric.is_falling))
"""The signals for which lower values are better."""
YOUNG = 8
"""The minimum number of steps for a verdict."""
LONG = 20
"""The minimum number of steps for the verdict *flat*."""


@dataclass(frozen=True, slots=True)
class Course:
    """The values of a metric by step, and the noise of the values from step to step."""

    steps: Sequence[int]
    values: Sequence[float]
    sigma: float
    width: int
    """The number of steps in a stretch."""

    def z(self, early: slice, late: slice) -> float:
        """Return the difference between the means of two stretches (later minus earlier), divided by its standard error."""
        a, b = self.values[early], self.values[late]
        if not a or not b:
            return 0.0
        gain = fmean(b) - fmean(a)
        error = self.sigma * math.sqrt(1 / len(a) + 1 / len(b))
        # Without noise, any difference counts, except rounding errors.
        return gain / error if error else 0.0 if abs(gain) < 1e-9 else math.copysign(math.inf, gain)

    @property
    def first(self) -> slice:
        """The indices of the first stretch of steps."""
        return slice(0, self.width)

    @property
    def last(self) -> slice:
        """The indices of the last stretch of steps."""
        return slice(len(self.values) - self.width, len(self.values))

    def mean(self, part: slice) -> float:
        """Return the mean of the values in a stretch of steps."""
        return fmean(self.values[part])

    def thirds(self) -> tuple[slice, slice]:
        """Return the indices of the first and of the last third of the steps."""
        size = len(self.values)
        return slice(0, size // 3), slice(size - size // 3, size)

    def rise(self) -> float:
        """Return the larger of two z values, which compare the first with the last stretch and the first with the last third."""
        # A few high steps alone are not a rise.
        lucky = median(self.values[self.last]) <= self.mean(self.first)
        return max(0.0 if lucky else self.z(self.first, self.last), self.z(*self.thirds()))

    def since(self, below: float) -> int:
        """Return the first step from which the metric remains at or below a value."""
        k = len(self.values)
        while k and self.values[k - 1] <= below:
            k -= 1
        return self.steps[min(k, len(self.steps) - 1)]

    def turn(self, start: int) -> int:
        """Return the index at which the values after `start` are best divided into two constant levels (least squares)."""
        own = self.values[start:]
        whole, size, total = sum(own), len(own), 0.0
        scores = []
        for k, value in enumerate(own[:-1], 1):
            total += value
            scores.append(total * total / k + (whole - total) ** 2 / (size - k))
        return start + 1 + max(range(len(scores)), key=scores.__getitem__)

    def best(self) -> slice:
        """Return the indices of the stretch of steps with the largest mean."""
        w = self.width
        sums = [sum(self.values[:w])]
        for k in range(w, len(self.values)):
            sums.append(sums[-1] + self.values[k] - self.values[k - w])
        at = max(range(len(sums)), key=sums.__getitem__)
        return slice(at, at + w)


def course(steps: Sequence[float], column: Column, counts: Column | None = None) -> Course | None:
    """Return the values and the noise of a column, or None if it has fewer than 3 values.

    If `counts` is given, each value is a share of the given number of episodes.
    """
    there = [(int(step), value) for step, value in zip(steps, column, strict=True) if _known(value)]
    if len(there) < 3:
        return None
    values = [value for _, value in there]
    moves = sorted(abs(b - a) for a, b in pairwise(values))
    if counts is None:
        sigma = math.sqrt(fmean([move * move for move in moves]) / 2)
    else:
        # A collapse is one or two large moves; near 0 most moves are 0, so their median is useless.
        usual = moves[:-2]
        share = min(1.0, max(0.0, fmean(values)))
        known = [count for count in counts if _known(count) and count > 0]
        chance = math.sqrt(share * (1 - share) / fmean(known)) if known else 0.0
        sigma = max(
            chance,
            1.4826 * median(moves) / math.sqrt(2),
            math.sqrt(fmean([move * move for move in usual]) / 2),
        )
    width = min(20, max(3, len(values) // 5), len(values) // 2)
    return Course([step for step, _ in there], values, sigma, width)


def judge(
    steps: Sequence[float],
    columns: Mapping[str, Column],
    evaluations: Sequence[Mapping[str, Any]] = (),
    *,
    opposed: bool = False,
) -> Verdict:
    """Return the verdict on a run.

    The argument `columns` holds every metric by name, with a value or None for each of `steps`. The argument
    `evaluations` holds rows with `step`, `success` and `interval`. The argument `opposed` states whether agents win
    what other agents lose.
    """
    if len(steps) < YOUNG:
        sentence = (
            f"{len(steps)} of the {YOUNG} steps that a verdict needs" if steps else "no step is recorded"
        )
        return Verdict("young", (Evidence("young", sentence, "success"),))
    found = _Found(steps, columns, evaluations, opposed)
    evidence: list[Evidence] = []
    for rule in (found.diverging, found.failing, found.collapsing, found.hacked, found.starved):
        evidence += rule()
    evidence = evidence or [found.course()]
    return Verdict(evidence[0].word, tuple(evidence))


class _Found:
    """The values that the rules of a verdict use."""

    def __init__(
        self,
        steps: Sequence[float],
        columns: Mapping[str, Column],
        evaluations: Sequence[Mapping[str, Any]],
        opposed: bool,
    ) -> None:
        self.steps, self.columns, self.opposed = steps, columns, opposed
        self.measured = [row for row in map(_measured, evaluations) if row is not None]
        # Rules about rewards do not apply to runs that learn from something else.
        distilled = bool(self._family("teacher_kl"))
        verifying = any(name.startswith("verifier_") for name in columns) and not self._family("advantage")
        demonstrated = any(name.startswith("demonstrated_") for name in columns)
        self.by_rewards = not (distilled or verifying or demonstrated)
        if distilled or verifying:
            columns = {name: column for name, column in columns.items() if name != "success"}
            self.columns, opposed = columns, True
        self.success = self._course("success", columns.get("scored") or columns.get("samples") or ())
        returns = [] if opposed else self._family("return") or self._family("reward")
        self.returns = course(steps, _mean(returns)) if returns else None
        self.name, self.signal = self._signal()
        self.rise = self.signal.rise() if self.signal else 0.0
        self.by_critic = any(name.startswith(("explained_variance/", "value_error/")) for name in columns)

    def _family(self, name: str) -> list[Column]:
        """Return the columns of a family of metrics, except those for the parts of a mixture."""
        return [
            column
            for key, column in self.columns.items()
            if key.startswith(f"{name}/") and key.count("/") == 1
        ]

    def _course(self, name: str, counts: Column | None = None) -> Course | None:
        return course(self.steps, self.columns[name], counts) if name in self.columns else None

    def _signal(self) -> tuple[str, Course | None]:
        """Return the name and the course of the signal, with a sign such that larger values are better."""
        if self.success is not None:
            return "success", self.success
        if self.returns is not None:
            return ("return" if self._family("return") else "reward"), self.returns
        for name, metric in progress_metrics().items():
            if name in self.columns:
                own = self.columns[name]
                return name, course(self.steps, _negative(own) if metric.is_falling else own)
        if "verifier_auc" in self.columns:
            return "verifier_auc", self._course("verifier_auc")
        for name in ("preference_accuracy", "verifier_accuracy"):
            if ranked := self._family(name):
                return name, course(self.steps, _mean(ranked))
        for name in ("teacher_kl", "nll"):
            if nats := self._family(name):
                return name, course(self.steps, _negative(_mean(nats)))
        return "", None

    def _fallen(self) -> list[Evidence]:
        """Return evidence of a decrease of the signal from its best to its last stretch, if the decrease is significant and large."""
        signal = self.signal
        known = progress_metrics().get(self.name)
        if (
            signal is None
            or len(signal.values) < YOUNG
            or self.name == "nll"
            or (known and known.is_relative)
        ):
            return []
        best, last, values = signal.best(), signal.mean(signal.last), signal.values
        top, low = signal.mean(best), max(last, median(values[signal.last]))
        if signal.z(best, signal.last) > -4:
            return []
        if self.name == "success":
            # Most steps of the best stretch must be above the last stretch, not only one or two.
            lucky = best.start > 0 and median(values[best]) <= last
            apart = low < top / 2 and top - low > 0.05
            matters = not lucky and (apart or top - low > 0.1)
        else:
            gained = top - signal.mean(signal.first) if signal.z(signal.first, best) >= 4 else 0.0
            apart = signal.z(signal.first, signal.last) <= -3
            matters = apart or top - low > gained / 2 > 0
        cut = signal.turn(best.start)
        at = signal.steps[cut]
        if not matters or (not apart and (self._harder(at) or self._traded())):
            return []
        good = range(len(values))[best.start : min(best.stop, cut)]
        shown = _percent if self.name == "success" else _figure
        sign = -1 if self.name in FALLING else 1
        when = f"{signal.steps[good[0]]}" + (f" to {signal.steps[good[-1]]}" if len(good) > 1 else "")
        sentence = (
            f"{WORDS.get(self.name, self.name)} {'fell' if sign > 0 else 'rose'} from {shown(sign * fmean(values[k] for k in good))} at step{'s' * (len(good) > 1)} {when} "
            f"to {shown(sign * last)}, and stays {'low' if sign > 0 else 'high'} from step {at} on"
        )
        return [Evidence("diverging", sentence, self.name, at)]

    def _harder(self, since: int) -> bool:
        """Return whether success on unseen problems, measured after the given step, is at least as high as in all earlier evaluations."""
        rows = self.measured
        return len(rows) > 1 and rows[-1][0] >= since and rows[-1][1] >= max(row[1] for row in rows[:-1])

    def _exploded(self) -> list[Evidence]:
        """Return evidence of KL divergences and gradient norms that are both large and ten times their first value."""
        found = []
        for family, phrase, bound in (
            ("kl", "KL to the reference of", 1.0),
            ("grad_norm", "gradient norm of", 10.0),
        ):
            for name, owner in self._members(family):
                own = self._course(name)
                if own is None:
                    continue
                before, after = median(own.values[own.first]), median(own.values[own.last])
                most = max(10 * before, bound if self.rise < 3 else 10 * bound)
                if after > most:
                    at = next(step for step, value in zip(own.steps, own.values, strict=True) if value > most)
                    found.append(
                        Evidence("diverging", f"{phrase} {owner} rose from {_figure(before)} to {_figure(after)}, first above {_figure(most)} at step {at}", family, at)
                    )  # fmt: skip
        return found

    def failing(self) -> list[Evidence]:
        """Return evidence of a large share of episodes that ended with an error, if the share remains large until the end."""
        failed = self._course("failed_episodes")
        if failed is None:
            return []
        late = failed.values[failed.thirds()[1]]
        share = min(1.0, fmean(late), median(late))
        if share <= 0.2:
            return []
        at = [step for step, value in zip(failed.steps, failed.values, strict=True) if value > 0.2]
        sentence = (
            f"{_percent(share)} of episodes ended in an error in the last third of the steps; the last "
            f"step with more than 20 % was step {at[-1]}"
        )
        return [Evidence("failing", sentence, "failed_episodes", at[-1])]

    def diverging(self) -> list[Evidence]:
        found = self._fallen() + self._exploded()
        for name, policy in self._members("entropy"):
            nats = self._course(name)
            if nats is None or self.rise >= 3:
                continue
            before, after = nats.mean(nats.first), nats.mean(nats.last)
            low = min(before, *nats.values[:2])  # the first update may already have destroyed the policy
            if after > 2 * low and after > low + 1:
                at = next(
                    step for step, value in zip(nats.steps, nats.values, strict=True) if value > low + 1
                )
                found.append(
                    Evidence("diverging", f"entropy of {policy} rose from {_figure(low)} to {_figure(after)} nats per token, and had risen by 1 nat at step {at}", "entropy", at)
                )  # fmt: skip
        size = len(self.steps) // 3
        for name, policy in (*self._members("undone"), *self._members("skipped")):
            late = self.columns[name][-size:]
            bad = [step for step, value in zip(self.steps[-size:], late, strict=True) if value]
            if len(bad) >= max(1, size / 10):
                found.append(
                    Evidence("diverging", f"updates of {policy} resulted in non-finite weights in {len(bad)} of the last {size} steps", name.partition("/")[0], int(bad[0]))
                )  # fmt: skip
        return found

    def collapsing(self) -> list[Evidence]:
        found, signal = [], self.signal
        if not self.by_rewards:
            return []  # low entropy is normal here: these runs imitate data or a teacher
        if signal is not None:
            half = len(signal.values) // 2
            rising = signal.z(slice(half, half + half // 2), slice(half + half // 2, len(signal.values))) >= 2
            if rising or self._near(0.9):
                return []
        for name, policy in self._members("entropy"):
            nats = self._course(name)
            if nats is None:
                continue
            before, after = nats.mean(nats.first), nats.mean(nats.last)
            if after <= 0.1 * before and after < 0.05:
                at = nats.since(0.1 * before)
                found.append(
                    Evidence("collapsing", f"entropy of {policy} fell from {_figure(before)} to {_figure(after)} nats per token, below a tenth from step {at} on", "entropy", at)
                )  # fmt: skip
        return found

    def _near(self, share: float) -> bool:
        """Return whether the last stretch of the signal reaches a share of what is possible, as far as this is known.

        Success is at most 1. Returns that have risen are compared with the highest value of `reward_max`, the mean over
        tasks of the best reward in a group.
        """
        known = [value for column in self._family("reward_max") for value in column if value is not None]
        risen = max(known, default=0.0) if self.returns and self.rise >= 3 else 0.0
        best = 1.0 if self.name == "success" else risen
        return best > 0 and self.signal is not None and self.signal.mean(self.signal.last) >= share * best

    def hacked(self) -> list[Evidence]:
        panel = "return" if self._family("return") else "reward"
        if fall := self._unseen_fall(panel):
            return [fall]
        return [Evidence("hacked", sentence, panel)] if (sentence := self._traded()) else []

    def _traded(self) -> str:
        """Return a phrase about the increase of the mean return and the decrease of success in training.

        The result is empty unless both occur.
        """
        returns, success = self.returns, self.success
        if returns is None or success is None or returns.rise() < 3:
            return ""
        if min(success.z(success.first, success.last), success.z(*success.thirds())) > -3:
            return ""
        return (
            f"the mean return rose from {_figure(returns.mean(returns.first))} to {_figure(returns.mean(returns.last))}, while success fell "
            f"from {_percent(success.mean(success.first))} to {_percent(success.mean(success.last))}"
        )

    def _unseen_fall(self, returns_panel: str) -> Evidence | None:
        """Return evidence of a decrease of success on unseen problems since the best evaluation, and of the change in training."""
        if len(self.measured) < 2 or self.opposed:
            return None
        *earlier, (end, now, _, high) = self.measured
        step, best, low, _ = max(earlier, key=lambda row: row[1])
        # The best of many evaluations may be above the others by chance, so both intervals are widened by the number of
        # comparisons.
        normal = NormalDist().inv_cdf
        wider = normal(1 - 0.025 / len(earlier)) / normal(0.975)
        if now + wider * (high - now) >= best - wider * (best - low):
            return None
        then = f"success on unseen problems fell from {_percent(best)} at step {step} to {_percent(now)} at step {end}"
        learned = self._between(self.success, step, end) if self.success else None
        gain = self._between(self.returns, step, end) if self.returns else None
        if learned and learned[2] >= 2:
            sentence = f"{then}, while success in training rose from {_percent(learned[0])} to {_percent(learned[1])}"
            return Evidence("memorising", sentence, "success", step)
        if gain and gain[2] >= 2:
            sentence = f"{then}, while the mean return rose from {_figure(gain[0])} to {_figure(gain[1])}"
            return Evidence("hacked", sentence, returns_panel, step)
        if best - now < 0.05:
            return None
        if learned:
            before, after, z = learned
            if z > -3 or (2 * (before - after) < best - now and 2 * after > before):
                sentence = (
                    f"{then}, while success in training changed from {_percent(before)} to {_percent(after)}"
                )
                return Evidence("memorising", sentence, "success", step)
        elif self.signal and (trained := self._between(self.signal, step, end)) and trained[2] > -3:
            sign = -1 if self.name in FALLING else 1
            went = (
                f"{WORDS[self.name]} changed from {_figure(sign * trained[0])} to "
                f"{_figure(sign * trained[1])}"
            )
            return Evidence("memorising", f"{then}, while {went}", "success", step)
        return Evidence("diverging", then, "success", step)

    def _between(self, own: Course, start: int, end: int) -> tuple[float, float, float] | None:
        """Return the means of the values up to one step and up to another step, with the z value of their difference.

        The result is None if there are too few values.
        """
        before = [k for k, step in enumerate(own.steps) if step <= max(start, own.steps[0] + own.width - 1)]
        after = [k for k, step in enumerate(own.steps) if step <= end]
        early = slice(max(0, len(before) - own.width), len(before))
        late = slice(max(early.stop, len(after) - own.width), len(after))
        if early.stop - early.start < 2 or late.stop - late.start < 2:
            return None
        return own.mean(early), own.mean(late), own.z(early, late)

    def _unrewarded(self) -> bool:
        """Return whether all completions have received the same reward, and this reward is not positive."""
        rewards = [*self._family("reward"), *self._family("reward_max")]
        others = [*self._family("return"), self.columns.get("success", ())]
        known = {value for column in rewards for value in column if value is not None}
        judged = any(name.startswith(("reward_model/", "verifier_")) for name in self.columns)
        return (
            self.by_rewards
            and not (self.opposed or judged)
            and len(known) == 1
            and max(known) <= 0
            and all(value is None or value <= 0 for column in others for value in column)
        )

    def starved(self) -> list[Evidence]:
        if self._unrewarded():
            sentence = f"no completion has received a reward above 0 in {len(self.steps)} steps"
            return [Evidence("starved", sentence, "reward", int(self.steps[0]))]
        dead = self._course("dead_groups")
        if dead is None or self.by_critic or not self.by_rewards:
            return []
        share = dead.mean(dead.thirds()[1])
        if share < 0.9 or self._near(0.95):
            return []
        whole = [step for step, value in zip(dead.steps, dead.values, strict=True) if value >= 1]
        sentence = f"{_percent(share)} of groups are dead in the last third"
        if whole:
            sentence = f"all groups are dead in {len(whole)} of {len(dead.steps)} steps, the last time at step {whole[-1]}"
        return [Evidence("starved", sentence, "dead_groups", whole[0] if whole else 0)]

    def course(self) -> Evidence:
        """Return the evidence about the course of the signal, for a run without any other problem."""
        signal, name = self.signal, self.name
        if signal is None or len(signal.values) < 3:
            if self.opposed:
                sentence = "agents win what others lose, so that returns do not show progress"
                return Evidence("unrated", sentence, "return")
            return Evidence("unrated", "no reward and no success is recorded", "success")
        start, end = signal.mean(signal.first), signal.mean(signal.last)
        shown = _percent if name == "success" else _figure
        sign = -1 if name in FALLING else 1
        count, one, two = len(signal.values), signal.steps[0], signal.steps[-1]
        over = (
            f"over {count} steps" if two - one < count else f"in {count} measurements, steps {one} to {two}"
        )
        span = f"from {shown(sign * start)} to {shown(sign * end)} {over}"
        word = WORDS.get(name, name)
        if self.rise >= 3:
            return Evidence("healthy", f"{word} {'rose' if sign > 0 else 'fell'} {span}", name)
        if name == "success" and end >= 0.95:
            return Evidence("healthy", f"success stays at {shown(end)}: these tasks are solved", name)
        if len(self.measured) > 1 and self.measured[-1][2] > self.measured[0][3]:
            (a, before, *_), (b, now, *_) = self.measured[0], self.measured[-1]
            sentence = f"success on unseen problems rose from {_percent(before)} at step {a} to {_percent(now)} at step {b}"
            return Evidence("healthy", sentence, "success")
        first, last = signal.thirds()
        gain = signal.mean(last) - signal.mean(first)
        error = signal.sigma * math.sqrt(1 / len(signal.values[first]) + 1 / len(signal.values[last]))
        # In a steady rise of 0.1, the middles of the outer thirds differ by two thirds of that.
        visible = 0.1 * 2 / 3 if name in ("success", "preference_accuracy") else max(signal.sigma, 1e-9)
        counted = (
            f"{word} changed {span}; the outer thirds differ by {_figure(sign * gain)} ± "
            f"{_figure(1.96 * error)}"
        )
        if len(signal.values) >= LONG and gain + 1.96 * error < visible:
            return Evidence("flat", counted, name)
        if abs(gain) <= 1.96 * error:
            return Evidence("young", f"{counted}, which can be explained by chance", name)
        # The gain refers to the signal: a lower NashConv counts as a rise.
        why = (
            "the rise is larger than chance usually explains, but too uncertain for the verdict healthy"
            if gain > 0
            else "the fall is larger than chance usually explains, but too small or too uncertain for the "
            "verdict diverging"
        )
        return Evidence("young", f"{counted}: {why}", name)

    def _members(self, family: str) -> list[tuple[str, str]]:
        """Return the names of the columns of a family, each with its agent or policy."""
        return [(name, name.partition("/")[2]) for name in self.columns if name.startswith(f"{family}/")]


def _measured(row: Mapping[str, Any]) -> tuple[int, float, float, float] | None:
    """Return the step and the success of an evaluation and the ends of the interval, or None if one of these is missing."""
    step, success, ends = row.get("step"), row.get("success"), row.get("interval")
    numbers = [step, success, *(ends if isinstance(ends, list | tuple) and len(ends) == 2 else ())]
    if len(numbers) != 4 or not all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        for value in numbers
    ):
        return None
    return int(numbers[0]), float(numbers[1]), float(numbers[2]), float(numbers[3])


def _known(value: float | None) -> TypeGuard[float]:
    """Return whether a value is a number whose square is finite. Damaged files may contain any value."""
    return value is not None and abs(value) < 1e100


def _mean(columns: Sequence[Column]) -> Column:
    """Return the mean of several columns for each step."""
    rows = ([value for value in values if _known(value)] for values in zip(*columns, strict=True))
    return [fmean(row) if row else None for row in rows]


def _negative(column: Column) -> Column:
    return [None if value is None else -value for value in column]


def _figure(value: float) -> str:
    return f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
