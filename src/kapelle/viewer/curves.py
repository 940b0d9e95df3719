"""Prepares the curves of runs: panels, series and axes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from statistics import median
from typing import Any, Literal
from warnings import catch_warnings, simplefilter

import numpy as np

from kapelle.functional.distributions import KINDS, TRACED, stacked
from kapelle.functional.statistics import t_quantile
from kapelle.runs.definitions import FEATURES, Metric, describe, metrics_of
from kapelle.runs.timeline import ACTIVITIES
from kapelle.viewer.episode import traced
from kapelle.viewer.library import AXES, ViewedRun
from kapelle.viewer.lines import number

POINTS = 1000
"""The maximum number of points of one curve on a page."""
MANY = 24
"""The maximum number of runs whose curves have `POINTS` points. With more runs, each curve has fewer points."""
Spread = Literal["error", "mean", "median"]
"""The type of a group's curve: the mean with the standard error or with Student's 95 % interval, or the median with quartiles."""
BANDS = (*ACTIVITIES, "idle")
"""The parts of the time of a step, from the bottom to the top of the stack."""


def panel_of(name: str) -> str:
    """Return the name of the panel that shows a metric."""
    return _owner(name)[0]


def _owner(name: str) -> tuple[str, str]:
    """Return the panel of a metric and its agent or policy, which is empty for metrics of the whole team."""
    described = describe(name)
    if described is not None and described.panel is not None:
        return described.panel
    if name.startswith("time/"):
        return name, ""
    family, _, who = name.partition("/")
    if family in ("reward_function", "reward_function_std"):
        # A reward function shares a panel with its criteria (`rubric`, `rubric/clear`) and its standard deviation.
        kind, _, part = who.partition("/")
        spread = "standard deviation" if family == "reward_function_std" else ""
        return f"reward_function/{kind}", ", ".join(word for word in (part, spread) if word) or "mean"
    if family in FEATURES and any(m.pattern.startswith(f"{family}/") for m in metrics_of(family)):
        kind, _, who = who.partition("/")
        family = f"{family}/{kind}"
    return family, who


SECTIONS: Mapping[str, tuple[str, ...]] = {
    "What is learned": ("success", "reward", "return", "reward_max", "dead_groups"),
    "How far weights move": (
        "advantage", "advantage_std", "entropy", "kl", "clip_share", "drift", "ratio_tail", "effective_samples", "grad_norm",
        "loss", "nll", "preference_accuracy", "preference_margin", "lr", "skipped", "undone", "parity",
    ),
    "Critics": ("value_error", "explained_variance", "mixer_loss", "mixer_explained"),
    "Turns": ("length", "turns", "finish_length", "truncated", "failed_episodes", "samples", "scored"),
    "Pace": ("time/tokens_per_second", "time/step", "tokens", "staleness", "unfinished_groups"),
    **{feature.replace("_", " ").capitalize(): tuple(dict.fromkeys(panel_of(metric.pattern) for metric in metrics_of(feature))) for feature in FEATURES},
}  # fmt: skip
"""The sections of a page with their panels in order. Panels are identified by the part of a metric's name before the slash.

The reward functions have a section with one panel per function, because their units differ."""
FUNCTIONS = "Reward functions"
REWARDED_SHARES = ("reward_function_none", "reward_function_failed")
"""The metrics that are shares of episodes. For these metrics, all reward functions share a panel."""


_UNKNOWN = Metric(
    "",
    "its own",
    "This version of kapelle does not know this metric: it comes from your own code, or from another version.",
    "",
    "a metric of your own",
)


@dataclass(frozen=True, slots=True)
class CurveSource:
    """The values of a run or of a group that are drawn as curves."""

    key: str
    label: str
    axes: Mapping[str, Sequence[float]]
    columns: Mapping[str, Sequence[float | None]]
    low: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """The lower edge of a group's band, by column; empty for a single run."""
    high: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    evaluations: Sequence[Mapping[str, Any]] = ()
    rows: int = 0
    """The number of steps that were read."""
    width: int = 1
    """The number of steps over which each point is averaged."""


def source_of(run: ViewedRun, label: str | None = None, width: int | None = None) -> CurveSource:
    """Return the curves of one run, with one point for each `width` steps. The default of `width` is computed from the number of steps."""
    with run.lock:
        run.refresh()
        table = run.metrics
        width = width or width_of(len(table))
        made = run.edition, label, width
        known = run.drawn.get(made)
        if isinstance(known, CurveSource):
            return known
        axes, columns = table.thinned(width)
        measured = []
        for row in run.evaluations:
            success, step = number(row.get("success")), number(row.get("step"))
            if success is None or step is None:  # no episode was scored
                continue
            interval = row.get("interval")
            ends = (
                [number(end) for end in interval] if isinstance(interval, list) and len(interval) == 2 else []
            )
            low, high = ends if None not in ends and ends else (success, success)
            k = bisect_right(table.axes["step"], step)
            at = {axis: (places[k - 1] if k else 0.0) for axis, places in table.axes.items()} | {"step": step}
            measured.append({"at": at, "success": success, "low": low, "high": high})
        label = label or run.path.name
        found = CurveSource(run.key, label, axes, columns, {}, {}, measured, len(table), width)
        run.drawn = {made: found}
        return found


def width_of(rows: int, runs: int = 1) -> int:
    """Return the number of steps over which each point is averaged. With many runs, each curve has fewer points."""
    points = POINTS if runs <= MANY else max(POINTS // 10, POINTS * MANY // runs)
    return max(1, -(-rows // points))


STRETCHES = 240
"""The maximum number of columns of a heat map."""


def distributions_page(run: ViewedRun) -> dict[str, Any]:
    """Return the heat maps of a run's distributions over steps as plain JSON values, one for each recorded distribution."""
    with run.lock:
        run.refresh()
        steps, rows = run.distributions()
    width = max(1, -(-len(steps) // STRETCHES))
    agents = run.agents()
    found: list[dict[str, Any]] = []
    for name in dict.fromkeys(name for row in rows for name in row):
        kind, _, who = name.partition("/")
        if kind not in KINDS:
            continue
        parts = [rows[start : start + width] for start in range(0, len(rows), width)]
        made = stacked([[row[name] for row in part if name in row] for part in parts])
        if made is None:
            continue
        title, unit, meaning = KINDS[kind]
        if kind in TRACED:
            newest = max(step for step, row in zip(steps, rows, strict=True) if name in row)
            title = f"{title}: {_traced(run, newest)}"
        found.append(
            {
                "name": name, "title": kind.replace("_", " "), "who": who, "color": color(who, agents), "known_as": title, "unit": unit,
                "meaning": meaning, "exponent": made.exponent, "first": made.first, "rows": made.rows,
            }
        )  # fmt: skip
    order = list(KINDS)
    found.sort(key=lambda each: order.index(str(each["name"]).partition("/")[0]))
    ends = [steps[min(start + width, len(steps)) - 1] for start in range(0, len(steps), width)]
    return {"steps": ends, "width": width, "maps": found}


def _traced(run: ViewedRun, step: int) -> str:
    """Return a phrase with the number of episodes of a step that have traces."""
    kept, all_steps = len(traced(run.path, step)), run.metrics.axes["step"]
    k = bisect_right(all_steps, step) - 1
    samples = run.metrics.columns["samples"][k] if k >= 0 and "samples" in run.metrics.columns else None
    among = f" of {samples:,.0f}" if samples is not None and all_steps[k] == step else ""
    return f"{kept or 'some'}{among} episodes at step {step}"


def grouped(sources: Sequence[tuple[str, CurveSource]], spread: Spread = "median") -> list[CurveSource]:
    """Return one source for each group, with the mean or the median of the group's runs and the band around it."""
    groups: dict[str, list[CurveSource]] = {}
    for name, source in sources:
        groups.setdefault(name, []).append(source)
    return [_merged(name, members, spread) for name, members in groups.items()]


def _merged(name: str, members: Sequence[CurveSource], spread: Spread) -> CurveSource:
    """Return the mean or the median of several runs and the band around it, for each interval of steps and each evaluated step."""
    if len(members) == 1:
        return replace(members[0], label=f"{name}: {members[0].label}")
    # An unfinished stretch of one run is merged with the same stretch of the other runs.
    cut = [[(step - 1) // members[0].width for step in each.axes["step"]] for each in members]
    numbers = sorted({number for own in cut for number in own})
    where = {number: k for k, number in enumerate(numbers)}

    def laid(columns: Sequence[Sequence[float | None]]) -> Any:
        """Return the values of the runs as an array with one row per run and NaN for missing values."""
        table = np.full((len(members), len(numbers)), np.nan)
        for row, (column, own) in enumerate(zip(columns, cut, strict=True)):
            if column:
                table[row, [where[number] for number in own]] = np.array(column, float)
        return table

    axes = {axis: _band(laid([each.axes[axis] for each in members]), "median")[1] for axis in AXES}
    names = dict.fromkeys(column for each in members for column in each.columns)
    bands = {
        column: _band(laid([each.columns.get(column, ()) for each in members]), spread) for column in names
    }
    low, middle, high = ({column: band[k] for column, band in bands.items()} for k in range(3))
    evaluated: dict[float, list[Mapping[str, Any]]] = {}
    for row in (row for each in members for row in each.evaluations):
        evaluated.setdefault(row["at"]["step"], []).append(row)
    measured = []
    for _, rows in sorted(evaluated.items()):
        ends = _band(np.array([[row["success"]] for row in rows], float), spread)
        at = {axis: median(row["at"][axis] for row in rows) for axis in AXES}
        success = ends[1][0]
        low_end, high_end = ends[0][0], ends[2][0]
        measured.append(
            {
                "at": at,
                "success": success,
                "low": success if low_end is None else low_end,
                "high": success if high_end is None else high_end,
            }
        )
    label = f"{name}, {'median' if spread == 'median' else 'mean'} of {len(members)}"
    places = {axis: [place or 0.0 for place in values] for axis, values in axes.items()}
    rows_read = min(each.rows for each in members)
    return CurveSource(members[0].key, label, places, middle, low, high, measured, rows_read)


def _band(table_RN: Any, spread: Spread) -> list[list[float | None]]:
    """Return the lower end, middle and upper end over R runs at each of N points. A value is None if too few runs have a value."""
    count = np.sum(~np.isnan(table_RN), axis=0)
    with np.errstate(all="ignore"), catch_warnings():
        simplefilter("ignore", RuntimeWarning)  # points without a value
        if spread == "median":
            ends = np.nanquantile(table_RN, (0.25, 0.5, 0.75), axis=0)
        else:
            half = np.nanstd(table_RN, axis=0, ddof=1) / np.sqrt(count)
            if spread == "mean":
                # Student's t, because the standard deviation is estimated from the same few runs.
                wide = {int(n): t_quantile(0.975, int(n) - 1) for n in np.unique(count) if n > 1}
                half = half * np.array([wide.get(int(n), np.nan) for n in count])
            middle = np.nanmean(table_RN, axis=0)
            ends = np.array([middle - half, middle, middle + half])
    return [[value if isfinite(value) else None for value in row] for row in ends.tolist()]


def page(
    sources: Sequence[CurveSource], agents: Sequence[str], sections: Mapping[str, tuple[str, ...]] = SECTIONS
) -> dict[str, Any]:
    """Return the content of a page of curves as plain JSON values."""
    names = dict.fromkeys(name for source in sources for name in source.columns)
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(_owner(name)[0], []).append(name)
    if sections is SECTIONS:
        rewards = sorted(family for family in families if family.startswith("reward_function/"))
        order = [
            each
            for title in sections
            for each in (title, *([FUNCTIONS] if title == "What is learned" else []))
        ]
        sections = {
            title: (*rewards, *REWARDED_SHARES) if title == FUNCTIONS else sections[title] for title in order
        }
    known = [family for own in sections.values() for family in own]
    more = sorted(family for family in families if family not in known and not family.startswith("time/"))
    filled = [
        {"title": title, "panels": [_panel(family, families[family], sources, agents) for family in own if family in families]}
        for title, own in {**sections, "More": tuple(more)}.items()
    ]  # fmt: skip
    return {
        "sources": [
            {"key": s.key, "label": s.label, "axes": s.axes, "rows": s.rows, "evaluations": s.evaluations}
            for s in sources
        ],
        "sections": [section for section in filled if section["panels"]],
        "times": [_times(source) for source in sources],
    }  # fmt: skip


def _panel(
    family: str, names: Sequence[str], sources: Sequence[CurveSource], agents: Sequence[str]
) -> dict[str, Any]:
    described = next((found for name in names if (found := describe(name)) is not None), _UNKNOWN)
    series = [
        {
            "source": place,
            "column": name,
            "who": (who := _owner(name)[1]),
            "color": color(who, agents),
            "y": source.columns[name],
            **({"low": source.low[name], "high": source.high[name]} if name in source.low else {}),
        }
        for place, source in enumerate(sources)
        for name in names
        if name in source.columns
    ]
    return {
        "name": family,
        "title": family.removeprefix("reward_function/")  # the name of the function
        if family.startswith("reward_function/")
        else family.rpartition("/")[2].replace("_", " ").replace("nash conv", "NashConv"),
        "unit": described.unit,
        "meaning": described.meaning,
        "warning": described.warning,
        "known_as": described.known_as,
        "series": series,
    }


def color(name: str, agents: Sequence[str]) -> int:
    """Return the number of an agent's colour, which is the same on every page. The number 0 is the colour of the team."""
    if not name:
        return 0
    known = list(agents)
    tail = name.rpartition("/")[2]
    if tail in known:
        return 1 + known.index(tail) % 7
    return 1 + sum(name.encode("utf-8", "replace")) % 7


def _times(source: CurveSource) -> dict[str, Any]:
    """Return the stacked durations of the parts of a step in seconds, as the upper edge of each band."""
    parts = [name for name in BANDS if f"time/{name}" in source.columns]
    below: list[float] = [0.0] * len(source.axes["step"])
    bands = []
    for name in parts:
        own = [value or 0.0 for value in source.columns[f"time/{name}"]]
        below = [a + b for a, b in zip(below, own, strict=True)]
        bands.append({"name": name, "own": own, "top": below})
    return {"bands": bands}
