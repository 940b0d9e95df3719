"""Draws figures for papers from the results of a comparison or of evaluations.

    from kapelle.comparison import plot

    print(plot("runs/compared/compare.json", "figure.pdf"))

A figure has three panels, following *Deep RL at the edge of the statistical precipice* (arXiv:2108.13264). The first
panel shows the interquartile mean of the final scores of the runs. The second panel shows the probability that a run of
one contender scores higher than a run of another contender. The third panel shows the interquartile mean over tokens or
steps. Each panel shows 95 % intervals from a bootstrap that resamples the runs of every task separately.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from kapelle.comparison.results import FORMATS, MISSING, can_draw, figure_file
from kapelle.errors import ConfigError, DataError, OutputError, did_you_mean
from kapelle.functional.statistics import (
    Interval,
    interquartile_mean,
    probability_of_improvement,
    stratified_interval,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = "compare.json"
POINTS = 60
"""The maximum number of points of a curve. A longer curve is drawn at evenly spaced points."""
PAIRS = 12
"""The maximum number of pairs in the panel of improvements. The pairs of the contenders with the highest scores are shown."""
Against = Literal["tokens", "step"]


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """The scores of one run on one task, after training and at every evaluation."""

    label: str
    task: str
    final: Mapping[str, float]
    """The final score by measure, where a measure is `success`, `return` or `return/ROLE`."""
    curve: Sequence[tuple[int, float, Mapping[str, float]]] = ()
    """The step, the number of tokens sampled for training up to that step, and the scores of each evaluation."""


@dataclass(frozen=True, slots=True)
class Summarised:
    """The numbers in a figure for one measure."""

    measure: str
    runs: Mapping[str, int]
    """The number of runs by contender, over all tasks."""
    means: Mapping[str, tuple[float, Interval]]
    """The interquartile mean and its 95 % interval, by contender."""
    improvements: Mapping[tuple[str, str], tuple[float, Interval]]
    """The probability that a run of the first contender scores higher than a run of the second contender, with its 95 % interval."""
    curves: Mapping[str, Mapping[str, Sequence[tuple[float, float, Interval]]]]
    """The curves by task and contender. Each point contains the position on the axis, the interquartile mean and its interval."""

    def __str__(self) -> str:
        """Return the numbers as lines of text."""
        lines = [f"{self.measure}: interquartile mean [95 % interval]"]
        width = max(map(len, self.means))
        for label, (mean, (low, high)) in self.means.items():
            count = f"{self.runs[label]} run{'' if self.runs[label] == 1 else 's'}"
            lines.append(f"  {label.ljust(width)}  {mean:.3f} [{low:.3f}, {high:.3f}]  {count}")
        lines += [
            f"  P({one} > {other}) = {chance:.3f} [{low:.3f}, {high:.3f}]"
            for (one, other), (chance, (low, high)) in self.improvements.items()
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Plotted:
    """The files of a figure, and the numbers that it shows."""

    files: tuple[Path, ...]
    measures: tuple[Summarised, ...]
    notes: tuple[str, ...] = ()
    """Notes about the choice of the measure."""

    def __str__(self) -> str:
        """Return the numbers and the paths of the figure as text."""
        few = any(count < 3 for each in self.measures for count in each.runs.values())
        notes = [
            *self.notes,
            *(
                ["An interval over fewer than three runs does not predict the results of other seeds."]
                if few
                else []
            ),
        ]
        return "\n".join([*map(str, self.measures), *notes, f"figure: {', '.join(map(str, self.files))}"])


def plot(
    results: str | Path | Sequence[str | Path],
    output: str | Path | Sequence[str | Path],
    *,
    against: Against = "tokens",
    metric: str | None = None,
    seed: int = 0,
) -> Plotted:
    """Draw the figure of `results` into `output` and return its numbers.

    The suffix of `output` determines the format (.pdf, .png or .svg). The argument `results` contains files of `kapelle
    compare` (`compare.json` or its folder), with one file per task. Alternatively, `results` contains files of `kapelle
    eval --output`, with one file per run, where `LABEL=FILE` sets the name of the team. The argument `against` selects
    the horizontal axis of curves: the tokens sampled for training, or the steps. The argument `metric` is `success`,
    `return` or `return/ROLE`. The default is success, or returns for a single task without success. The argument `seed`
    is the seed of the bootstrap. Contenders without runs on all tasks are excluded from the first two panels. Raises
    ConfigError if the figure cannot be drawn or written, and DataError for a file without results.
    """
    if not can_draw():
        raise ConfigError(MISSING)
    given = [results] if isinstance(results, str | Path) else list(results)
    paths = tuple(Path(each) for each in ([output] if isinstance(output, str | Path) else list(output)))
    for path in paths:
        if path.suffix.lower().lstrip(".") not in FORMATS:
            raise ConfigError(f"--output {path}: the name must end in .pdf, .png or .svg.")
    if against not in ("tokens", "step"):
        raise ConfigError(f"`against` is {against!r}. Use `tokens` or `step`.")
    runs = read_scores(given)
    found = summarise(runs, against, seed, metric)
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        _draw(found, paths, against)
    except OSError as error:
        where = error.filename or paths[0]
        raise OutputError(f"{where} cannot be written: {error.strerror}. Use another --output.") from error
    return Plotted(paths, found, _measures(runs, metric)[1])


# -------- Reading results


def read_scores(results: Sequence[str | Path]) -> list[ScoredRun]:
    """Return the scores of every run in the files, except runs that failed or have not finished."""
    if not results:
        raise ConfigError(
            "There are no results to draw. Pass a folder of `kapelle compare`, or files of `kapelle eval --output`."
        )
    found: list[ScoredRun] = []
    for number, word in enumerate(results):
        label, path = _named(word)
        if path.is_dir():
            path /= RESULTS
        try:
            values = json.loads(path.read_bytes())
            if "contenders" in values:
                # Two folders may hold the same recipe with different settings; these count as different tasks.
                task = str(values["recipe"])
                taken = {run.task for run in found}
                found += _compared(values, task if task not in taken else f"{task} {number + 1}")
            else:
                for row in values.get("evaluations", [values]):
                    found += _evaluated(row, label)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise DataError(
                f"{path} contains no results: {why}. Use a folder that `kapelle compare` wrote, or a file of `kapelle eval --output FILE.json`."
            ) from error
    if not found:
        raise DataError(
            "These results contain no finished run. Finish the training first: `kapelle compare … --run-dir FOLDER`."
        )
    return found


def _named(word: str | Path) -> tuple[str, Path]:
    label, equals, path = str(word).partition("=")
    return (label, Path(path)) if equals and not Path(word).exists() else ("", Path(word))


def _compared(values: Mapping[str, Any], task: str) -> list[ScoredRun]:
    by_role = any(each.get("returns") for each in values["contenders"])
    found = []
    for run in values["runs"]:
        if run["error"] is None:
            curve = [
                (int(at["step"]), float(at["tokens"]), _scores(at, by_role=by_role))
                for at in run.get("curve", ())
            ]
            found.append(ScoredRun(run["label"], task, _scores(run, by_role=by_role), curve))
    return found


def _evaluated(row: Mapping[str, Any], label: str) -> list[ScoredRun]:
    """Return the scores of the team and of each baseline in an evaluation."""
    task = str(row["environment"])
    found = [ScoredRun(label or "team", task, _scores(row, by_role=bool(row.get("games"))))]
    for each in row.get("baselines", ()):
        agents = ", ".join(each["agents"])
        name = f"{agents} alone" if each["answers"] == 1 else f"{agents}, majority of {each['answers']}"
        found.append(ScoredRun(f"{label}: {name}" if label else name, task, _scores(each, by_role=False)))
    return found


def _scores(row: Mapping[str, Any], *, by_role: bool) -> dict[str, float]:
    """Return the scores in a row by measure. If `by_role` is true, the return of each role is a separate measure."""
    rewards: Mapping[str, float] = row.get("reward") or {}
    found = {} if row["success"] is None else {"success": float(row["success"])}
    if by_role:
        found |= {f"return/{role}": float(value) for role, value in rewards.items()}
    elif rewards:
        found["return"] = fmean(rewards.values())
    return found


# -------- Numbers


def summarise(
    runs: Sequence[ScoredRun], against: Against, seed: int, metric: str | None = None
) -> tuple[Summarised, ...]:
    """Return the numbers of each measure, which is `metric` or, by default, success if it is available and otherwise the returns."""
    measures, _ = _measures(runs, metric)
    return tuple(_summarised(measure, runs, _tasks(runs), against, seed) for measure in measures)


def _tasks(runs: Sequence[ScoredRun]) -> list[str]:
    return list(dict.fromkeys(run.task for run in runs))


def _measures(runs: Sequence[ScoredRun], metric: str | None) -> tuple[list[str], tuple[str, ...]]:
    """Return the measures to draw, and notes about the choice."""
    names, tasks = list(dict.fromkeys(name for run in runs for name in run.final)), _tasks(runs)
    if not names:
        raise DataError(
            "These results contain neither a success rate nor a return. Use the results of an evaluation."
        )
    notes = []
    if metric == "success" and metric not in names and "return" in names:
        notes.append("None of these runs has a success rate, so their returns are drawn.")
        metric = "return"
    if metric is not None and metric not in names:
        known = ", ".join(f"`{name}`" for name in names)
        raise ConfigError(
            f"--metric {metric} is not in these results, which have {known}.{did_you_mean(metric, names)}"
        )
    measures = [metric] if metric is not None else ["success"] if "success" in names else names
    if len(tasks) > 1 and measures != ["success"]:
        if metric is None:
            named = "return" if "return" in names else names[0]
            raise ConfigError(
                f"Returns of several tasks ({', '.join(tasks)}) have different units. Draw each task separately, or set "
                f"--metric {named} to draw their mean."
            )
        notes.append(
            f"A mean of returns over several tasks ({', '.join(tasks)}) gives tasks with larger returns more "
            "weight. Probabilities of improvement compare runs on the same task, and do not depend on its "
            "unit."
        )
    return measures, tuple(notes)


def _summarised(
    measure: str, runs: Sequence[ScoredRun], tasks: Sequence[str], against: Against, seed: int
) -> Summarised:
    labels = list(dict.fromkeys(run.label for run in runs))
    table = {
        label: [
            [
                run.final[measure]
                for run in runs
                if run.label == label and run.task == task and measure in run.final
            ]
            for task in tasks
        ]
        for label in labels
    }
    table = {label: strata for label, strata in table.items() if all(strata)}
    if not table:
        others = sorted({name for run in runs for name in run.final} - {measure})
        known = ", ".join(
            f"--metric {name}"
            for name in others
            if set(tasks) == {run.task for run in runs if name in run.final}
        )
        instead = f" All tasks have values for {known}." if known else " Draw each task separately."
        raise DataError(f"No contender has a {measure} on each of {', '.join(tasks)}.{instead}")

    def mean(strata: Sequence[Sequence[float]]) -> float:
        return interquartile_mean([value for values in strata for value in values])

    means = {
        label: (mean(strata), stratified_interval(strata, mean, seed)) for label, strata in table.items()
    }
    best = sorted(means, key=lambda label: -means[label][0])

    def improved(strata: Sequence[Sequence[float]]) -> float:
        return probability_of_improvement(strata[: len(tasks)], strata[len(tasks) :])

    improvements = {}
    for one, other in list(combinations(best, 2))[:PAIRS]:
        both = [*table[one], *table[other]]
        improvements[one, other] = improved(both), stratified_interval(both, improved, seed)
    curves = {
        task: {
            label: points
            for label in labels
            if (
                points := _curve(
                    [run for run in runs if run.label == label and run.task == task],
                    measure,
                    against,
                    mean,
                    seed,
                )
            )
        }
        for task in tasks
    }
    counts = {label: sum(map(len, strata)) for label, strata in table.items()}
    return Summarised(
        measure, counts, means, improvements, {task: own for task, own in curves.items() if own}
    )


def _curve(
    runs: Sequence[ScoredRun],
    measure: str,
    against: Against,
    mean: Callable[[Sequence[Sequence[float]]], float],
    seed: int,
) -> list[tuple[float, float, Interval]]:
    """Return the mean over the runs at each step at which all runs were evaluated.

    If the axis is tokens, the position is the mean number of tokens sampled up to the step.
    """
    known = [
        {step: (tokens, scores[measure]) for step, tokens, scores in run.curve if measure in scores}
        for run in runs
    ]
    steps = sorted(set.intersection(*map(set, known))) if known else []
    if len(steps) > POINTS:
        steps = [steps[round(k * (len(steps) - 1) / (POINTS - 1))] for k in range(POINTS)]
    found = []
    for step in steps:
        values = [own[step][1] for own in known]
        place = fmean(own[step][0] for own in known) if against == "tokens" else float(step)
        found.append((place, mean([values]), stratified_interval([values], mean, seed, resamples=1000)))
    return found


# -------- Drawing


def _draw(measures: Sequence[Summarised], paths: Sequence[Path], against: Against) -> None:
    """Draw a row of panels for each measure.

    The panels show means, improvements (if there are at least two contenders), and curves for each task.
    """
    tasks = list(dict.fromkeys(task for each in measures for task in each.curves))
    pairs = max(len(each.improvements) for each in measures)
    rows = max(pairs, *(len(each.means) for each in measures))
    columns = 1 + bool(pairs) + len(tasks)
    size = 3.4 * columns + 0.6, (1.7 + 0.22 * max(rows, 4)) * len(measures)
    with figure_file(*paths, size=size) as figure:
        grid = figure.subplots(len(measures), columns, squeeze=False)
        for line, each in zip(grid, measures, strict=True):
            colors = {label: f"C{k % 10}" for k, label in enumerate(each.means)}
            _intervals(line[0], list(each.means.items()), [colors[label] for label in each.means])
            line[0].set_xlabel(f"{each.measure}, interquartile mean")
            if pairs:
                named = [(f"{one} > {other}", value) for (one, other), value in each.improvements.items()]
                _intervals(line[1], named, [colors[one] for one, _ in each.improvements])
                line[1].axvline(0.5, color="0.6", linewidth=0.8, linestyle="--")
                line[1].set_xlim(-0.03, 1.03)
                line[1].set_xlabel("probability of improvement")
            for axes, task in zip(line[1 + bool(pairs) :], tasks, strict=True):
                for k, (label, points) in enumerate(each.curves.get(task, {}).items()):
                    color = colors.get(label, f"C{(len(colors) + k) % 10}")
                    places = [at for at, _, _ in points]
                    axes.plot(
                        places,
                        [value for _, value, _ in points],
                        color=color,
                        label=label,
                        linewidth=1.4,
                        marker="o" if len(points) <= 12 else "",
                        markersize=3,
                    )
                    low, high = [ends[0] for *_, ends in points], [ends[1] for *_, ends in points]
                    axes.fill_between(places, low, high, color=color, alpha=0.18, linewidth=0)
                axes.set_xlabel("tokens sampled to train" if against == "tokens" else "steps")
                axes.set_ylabel(f"{each.measure}, unseen problems")
                axes.grid(alpha=0.25)
                axes.legend(fontsize="x-small", frameon=False)
                if len(tasks) > 1:
                    axes.set_title(task, fontsize="small")


def _intervals(
    axes: Axes, named: Sequence[tuple[str, tuple[float, Interval]]], colors: Sequence[str]
) -> None:
    """Draw each value as a point on its interval, with the name on the axis."""
    for row, ((_, (value, (low, high))), color) in enumerate(zip(named, colors, strict=True)):
        axes.plot([low, high], [row, row], color=color, linewidth=6, alpha=0.35, solid_capstyle="butt")
        axes.plot([value], [row], color=color, marker="|", markersize=11, markeredgewidth=2)
    axes.set_yticks(range(len(named)), [name for name, _ in named], fontsize="small")
    axes.set_ylim(len(named) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.25)
