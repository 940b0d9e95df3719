"""Compares runs: curves grouped by settings, and a table of the settings that differ, with the results.

A query contains the runs (`run=KEY`, repeated) and the settings to group by (`by=optimizer.lr`, repeated). With
`by=seed`, the seeds of each recipe form a group, and with an empty `by=`, each run is drawn. A query also contains the
type of a group's curve (`spread=error`, `mean` or `median`) and the maximum number of curves (`most`). If the query has
no `by`, five or more runs are grouped by the settings that vary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from kapelle.functional.statistics import mean_interval
from kapelle.runs.summary import flat
from kapelle.viewer import curves
from kapelle.viewer.library import Library, ViewedRun
from kapelle.viewer.lines import number
from kapelle.viewer.pages import chosen, html, json_answer, labels
from kapelle.viewer.presenting import alike, differing, listed

SEED = "seed"
"""The choice of `by` that groups the seeds of each recipe."""
DRAWN = (12, 24, 48, 96, 500)
"""The choices for the maximum number of curves."""
USUAL = 24
"""The default of the maximum number of curves."""
GROUPED = 5
"""The minimum number of runs that are grouped by default."""
GROUPS = 12
"""The maximum number of groups if runs are grouped by default."""
WIDE = 8
"""The maximum number of runs or groups that are shown as columns of the settings table. A larger number of runs or groups is
shown as rows."""
COLUMNS = 16
"""The maximum number of settings in a table that has one row for each run."""


@dataclass(frozen=True, slots=True)
class ComparisonQuery:
    """The choices in a query."""

    by: tuple[str, ...]
    """The settings by which runs are grouped. If empty, each run is drawn as a separate curve."""
    spread: curves.Spread
    most: int

    @classmethod
    def of(cls, query: QueryParams, runs: Sequence[ViewedRun]) -> ComparisonQuery:
        """Read a query about the given runs. Missing choices are replaced by their defaults."""
        chosen = tuple(dict.fromkeys(name for name in query.getlist("by") if name))[:4]
        by = chosen if "by" in query else usual_grouping(runs)
        most, spread = query.get("most", ""), query.get("spread")
        return cls(
            by,
            "median" if spread == "median" else "mean" if spread == "mean" else "error",
            int(most) if most in map(str, DRAWN) else USUAL,
        )

    def query(self) -> str:
        """Return the choices as part of a query string."""
        names = self.by or ("",)
        return urlencode([*(("by", name) for name in names), ("spread", self.spread), ("most", self.most)])

    def arranged(self, runs: Sequence[ViewedRun]) -> tuple[list[ViewedRun], list[str]]:
        """Return the runs in the order of their groups' values, and the name of each run's group.

        Without groups, the list of names is empty.
        """
        if not self.by:
            return list(runs), []
        if self.by == (SEED,):
            return list(runs), _recipes(runs)
        settings = [flat(run.settings()) for run in runs]
        values = [[own.get(name, "not set") for name in self.by] for own in settings]
        # With several settings, the last part of each setting's name is sufficient.
        heads = [name if len(self.by) == 1 else name.rpartition(".")[2] for name in self.by]
        named = [
            ", ".join(
                str(value) if head == "name" else f"{head} {value}"
                for head, value in zip(heads, own, strict=True)
            )
            for own in values
        ]
        order = sorted(range(len(runs)), key=lambda k: [_rank(value) for value in values[k]])
        return [runs[k] for k in order], [named[k] for k in order]


def usual_grouping(runs: Sequence[ViewedRun]) -> tuple[str, ...]:
    """Return the settings that vary among five or more runs, starting with those with the fewest values, in at most `GROUPS` groups.

    Returns the seed if no other setting varies, and an empty tuple for fewer runs.
    """
    if len(runs) < GROUPED:
        return ()
    rows = [row for row in differing(runs) if row["name"] not in (SEED, "description")]
    rows.sort(key=lambda row: len(set(map(str, row["values"]))))
    names: list[str] = []
    groups: list[tuple[str, ...]] = [()] * len(runs)
    for row in rows:
        finer = [(*group, str(value)) for group, value in zip(groups, row["values"], strict=True)]
        if len(set(groups)) < len(set(finer)) <= GROUPS:
            names.append(row["name"])
            groups = finer
    return tuple(names) or (rows[0]["name"] if rows else SEED,)


def _rank(value: object) -> tuple[bool, float, str]:
    """Return a sort key for the value of a setting. Numbers are sorted by size and come before strings."""
    found = number(value)
    return found is None, found or 0.0, str(value)


def _recipes(runs: Sequence[ViewedRun]) -> list[str]:
    """Return the name of the recipe of each run, which consists of the recipe and the algorithm.

    The folder is added if several recipes have the same name and algorithm.
    """
    kinds = [alike(run) for run in runs]
    first = dict(reversed(list(zip(kinds, runs, strict=True))))
    names = {kind: "{recipe}, {algorithm}".format(**listed(run)) for kind, run in first.items()}
    shared = list(names.values())
    return [
        f"{names[kind]} ({first[kind].path.name})" if shared.count(names[kind]) > 1 else names[kind]
        for kind in kinds
    ]


def drawn(runs: Sequence[ViewedRun], choice: ComparisonQuery) -> list[curves.CurveSource]:
    """Return the curves of the runs or of their groups, up to the chosen maximum number of curves."""
    runs, groups = choice.arranged(runs)
    if not groups:
        runs = runs[: choice.most]
    width = None
    if groups or len(runs) > USUAL:  # each point must average the same steps in all runs of a group
        rows = []
        for run in runs:
            with run.lock:
                run.refresh()
                rows.append(len(run.metrics))
        width = curves.width_of(max(rows, default=0), len(runs))
    sources = [curves.source_of(run, name, width) for run, name in zip(runs, labels(runs), strict=True)]
    if not groups:
        return sources
    return curves.grouped(list(zip(groups, sources, strict=True)), choice.spread)[: choice.most]


class DrawnRuns:
    """Responds to requests with the curves and the page of a comparison."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def answer(self, request: Request) -> Response:
        """Return the curves of the chosen runs as JSON."""
        runs = chosen(self._library, request)
        sources = drawn(runs, ComparisonQuery.of(request.query_params, runs))
        agents = list(dict.fromkeys(agent for run in runs for agent in run.agents()))
        return json_answer(curves.page(sources, agents))

    def page(self, request: Request) -> Response:
        """Return the page that compares runs."""
        runs = chosen(self._library, request)
        choice = ComparisonQuery.of(request.query_params, runs)
        runs, groups = choice.arranged(runs)
        given = len(set(request.query_params.getlist("run")))
        settings = differing(runs)
        rows = standings(runs, groups, settings)
        kept = urlencode([("run", run.key) for run in runs])
        return html(
            "compare.html",
            runs=[run.key for run in runs],
            excluded=given - len(runs),
            rows=rows,
            wide=len(rows) <= WIDE,
            settings=[row["name"] for row in settings],
            columns=COLUMNS,
            choice=choice,
            by=[*choice.by, "", ""][: max(2, len(choice.by))],
            most=DRAWN,
            drawn=min(len(rows), choice.most),
            kept=kept,
        )


def standings(
    runs: Sequence[ViewedRun], groups: Sequence[str], settings: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row for each run or group with the settings that differ and the mean success.

    The mean success has a 95 % interval, which is computed over the runs of the group.
    """
    names = groups or [run.key.replace("~", "/") for run in runs]
    members: dict[str, list[int]] = {}
    for k, name in enumerate(names):
        members.setdefault(name, []).append(k)
    rows = []
    for name, own in members.items():
        measured = [row for k in own if (row := _measured(runs[k])) is not None]
        interval = mean_interval(measured)
        rows.append(
            {
                "name": name,
                "key": None if groups else runs[own[0]].key,
                "count": len(own),
                "success": fmean(measured) if measured else None,
                "interval": interval and (max(0.0, interval[0]), min(1.0, interval[1])),
                "values": [_together([row["values"][k] for k in own]) for row in settings],
            }
        )
    return rows


def _measured(run: ViewedRun) -> float | None:
    """Return the most recent success rate of a run on unseen problems."""
    with run.lock:
        run.refresh()
        row = run.measured()
    return None if row is None else number(row.get("success"))


def _together(values: Sequence[object]) -> str:
    """Return the distinct values in a group as a string such as `0, 1, 2`. If there are many values, only the first ones are included."""
    texts = list(dict.fromkeys(map(str, values)))
    return ", ".join(texts[:6]) + (f" and {len(texts) - 6} more" if len(texts) > 6 else "")
