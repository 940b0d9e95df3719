"""Comparison of runs: curves grouped by settings, and a table of the settings that differ, with results.

A query names the runs (`run=KEY`, repeated), the settings to group by (`by=optimizer.lr`, repeated; `by=seed` groups the
seeds of each recipe), the curve of a group (`spread=mean` or `median`) and the most curves (`most`).
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
"""Groups the seeds of each recipe."""
DRAWN = (12, 24, 48, 96, 500)
"""Choices for the most curves."""
USUAL = 24
"""Default for the most curves."""
WIDE = 8
"""Most runs or groups that are columns of the table of settings; beyond that they are rows."""
COLUMNS = 16
"""Most settings in a table with one row for each run."""


@dataclass(frozen=True, slots=True)
class ComparisonQuery:
    """The choices in a query."""

    by: tuple[str, ...]
    """Settings to group runs by; empty to draw each run."""
    spread: curves.Spread
    most: int

    @classmethod
    def of(cls, query: QueryParams) -> ComparisonQuery:
        """Read a query, with defaults."""
        by = tuple(dict.fromkeys(name for name in query.getlist("by") if name))[:4]
        most = query.get("most", "")
        return cls(
            by,
            "median" if query.get("spread") == "median" else "mean",
            int(most) if most in map(str, DRAWN) else USUAL,
        )

    def query(self) -> str:
        """Return it as a part of a query."""
        return urlencode([*(("by", name) for name in self.by), ("spread", self.spread), ("most", self.most)])

    def arranged(self, runs: Sequence[ViewedRun]) -> tuple[list[ViewedRun], list[str]]:
        """Return the runs in the order of their groups' values, and the name of each run's group; no names without groups."""
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


def _rank(value: object) -> tuple[bool, float, str]:
    """Return a sort key for a setting's value: numbers by size, then texts."""
    found = number(value)
    return found is None, found or 0.0, str(value)


def _recipes(runs: Sequence[ViewedRun]) -> list[str]:
    """Return the name of each run's recipe: recipe and algorithm, with a folder if several recipes share those."""
    kinds = [alike(run) for run in runs]
    first = dict(reversed(list(zip(kinds, runs, strict=True))))
    names = {kind: "{recipe}, {algorithm}".format(**listed(run)) for kind, run in first.items()}
    shared = list(names.values())
    return [
        f"{names[kind]} ({first[kind].path.name})" if shared.count(names[kind]) > 1 else names[kind]
        for kind in kinds
    ]


class DrawnRuns:
    """Answers with the curves and the page of a comparison."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def answer(self, request: Request) -> Response:
        """Return the curves as JSON."""
        choice = ComparisonQuery.of(request.query_params)
        runs, groups = choice.arranged(chosen(self._library, request))
        if not groups:
            runs = runs[: choice.most]
        width = None
        if groups or len(runs) > USUAL:  # the points of a group's runs must average the same steps
            rows = []
            for run in runs:
                with run.lock:
                    run.refresh()
                    rows.append(len(run.metrics))
            width = curves.width_of(max(rows, default=0), len(runs))
        sources = [curves.source_of(run, name, width) for run, name in zip(runs, labels(runs), strict=True)]
        agents = list(dict.fromkeys(agent for run in runs for agent in run.agents()))
        if groups:
            sources = curves.grouped(list(zip(groups, sources, strict=True)), choice.spread)[: choice.most]
        return json_answer(curves.page(sources, agents))

    def page(self, request: Request) -> Response:
        """Return the page that compares runs."""
        choice = ComparisonQuery.of(request.query_params)
        runs, groups = choice.arranged(chosen(self._library, request))
        given = len(set(request.query_params.getlist("run")))
        settings = differing(runs)
        rows = standings(runs, groups, settings)
        kept = urlencode([("run", run.key) for run in runs])
        return html(
            "compare.html",
            runs=[run.key for run in runs],
            left_out=given - len(runs),
            rows=rows,
            wide=len(rows) <= WIDE,
            settings=[row["name"] for row in settings],
            columns=COLUMNS,
            asked=choice,
            by=[*choice.by, "", ""][: max(2, len(choice.by))],
            most=DRAWN,
            drawn=min(len(rows), choice.most),
            kept=kept,
        )


def standings(
    runs: Sequence[ViewedRun], groups: Sequence[str], settings: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row for each run or group: settings that differ, and mean success with a 95 % interval over its runs."""
    names = groups or [run.key.replace("~", "/") for run in runs]
    members: dict[str, list[int]] = {}
    for k, name in enumerate(names):
        members.setdefault(name, []).append(k)
    rows = []
    for name, own in members.items():
        measured = [row for k in own if (row := _measured(runs[k])) is not None]
        rows.append(
            {
                "name": name,
                "key": None if groups else runs[own[0]].key,
                "count": len(own),
                "success": fmean(measured) if measured else None,
                "interval": mean_interval(measured),
                "values": [_together([row["values"][k] for k in own]) for row in settings],
            }
        )
    return rows


def _measured(run: ViewedRun) -> float | None:
    """Return a run's newest success on unseen problems."""
    with run.lock:
        run.refresh()
        row = run.measured()
    return None if row is None else number(row.get("success"))


def _together(values: Sequence[object]) -> str:
    """Return the different values in a group: `0, 1, 2`, or the first ones of many."""
    texts = list(dict.fromkeys(map(str, values)))
    return ", ".join(texts[:6]) + (f" and {len(texts) - 6} more" if len(texts) > 6 else "")
