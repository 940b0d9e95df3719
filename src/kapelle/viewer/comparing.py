"""Runs compared as experiments are: grouped by any setting, and as a table of what differs and what came of it.

A query names the runs (`run=KEY`, several times), what they are grouped by (`by=optimizer.lr`, several times; `by=seed` keeps
apart whatever differs in more than the seed), how a group is drawn (`spread=mean` or `median`) and how many curves at most (`most`).
"""

from __future__ import annotations

import csv
import io
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
"""What groups the seeds of one recipe."""
DRAWN = (12, 24, 48, 96, 500)
"""How many curves may be asked for."""
USUAL = 24
"""Most curves that are drawn unless more are asked for."""
WIDE = 8
"""Up to so many runs or groups each has a column of the table of settings; more have a row."""
COLUMNS = 16
"""Most settings in a table with a row for each run."""


@dataclass(frozen=True, slots=True)
class AskedComparison:
    """What a query asks for."""

    by: tuple[str, ...]
    """Settings that runs are grouped by; empty where each run is drawn by itself."""
    spread: curves.Spread
    most: int

    @classmethod
    def of(cls, query: QueryParams) -> AskedComparison:
        """Read a query; what it does not say is as usual."""
        by = tuple(dict.fromkeys(name for name in query.getlist("by") if name))[:4]
        most = query.get("most", "")
        return cls(
            by,
            "median" if query.get("spread") == "median" else "mean",
            int(most) if most in map(str, DRAWN) else USUAL,
        )

    def query(self) -> str:
        """Return it as the part of a query behind the runs."""
        return urlencode([*(("by", name) for name in self.by), ("spread", self.spread), ("most", self.most)])

    def arranged(self, runs: Sequence[ViewedRun]) -> tuple[list[ViewedRun], list[str]]:
        """Return the runs and the name of each one's group, group by group in the order of their values; no names where not grouped."""
        if not self.by:
            return list(runs), []
        if self.by == (SEED,):
            return list(runs), _recipes(runs)
        settings = [flat(run.settings()) for run in runs]
        values = [[own.get(name, "not set") for name in self.by] for own in settings]
        # The last part of a setting's name is enough beside others; a name speaks for itself.
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
    """Return where a setting's value comes among others: numbers by size, then texts."""
    found = number(value)
    return found is None, found or 0.0, str(value)


def _recipes(runs: Sequence[ViewedRun]) -> list[str]:
    """Return what each run has in common with its other seeds: recipe and algorithm, and its folder where others share those."""
    kinds = [alike(run) for run in runs]
    first = dict(reversed(list(zip(kinds, runs, strict=True))))
    names = {kind: "{recipe}, {algorithm}".format(**listed(run)) for kind, run in first.items()}
    shared = list(names.values())
    return [
        f"{names[kind]} ({first[kind].path.name})" if shared.count(names[kind]) > 1 else names[kind]
        for kind in kinds
    ]


class DrawnRuns:
    """Answers with the curves of runs, and with the page and the table of a comparison."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def answer(self, request: Request) -> Response:
        """Return what a page of curves draws, as JSON."""
        asked = AskedComparison.of(request.query_params)
        runs, groups = asked.arranged(chosen(self._library, request))
        if not groups:
            runs = runs[: asked.most]
        width = None
        if groups or len(runs) > USUAL:  # the runs of a group are cut at the same steps
            rows = []
            for run in runs:
                with run.lock:
                    run.refresh()
                    rows.append(len(run.metrics))
            width = curves.width_of(max(rows, default=0), len(runs))
        sources = [curves.source_of(run, name, width) for run, name in zip(runs, labels(runs), strict=True)]
        agents = list(dict.fromkeys(agent for run in runs for agent in run.agents()))
        if groups:
            sources = curves.grouped(list(zip(groups, sources, strict=True)), asked.spread)[: asked.most]
        return json_answer(curves.page(sources, agents))

    def page(self, request: Request) -> Response:
        """Return the page that compares runs."""
        asked = AskedComparison.of(request.query_params)
        runs, groups = asked.arranged(chosen(self._library, request))
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
            asked=asked,
            by=[*asked.by, "", ""][: max(2, len(asked.by))],
            most=DRAWN,
            drawn=min(len(rows), asked.most),
            kept=kept,
        )

    def table(self, request: Request) -> Response:
        """Return the settings that differ and the results, as CSV: a row for each run."""
        runs, groups = AskedComparison.of(request.query_params).arranged(chosen(self._library, request))
        settings = differing(runs)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        unseen = "success on unseen problems"
        numbers = [
            "step",
            "success in training",
            "scored episodes",
            unseen,
            "scored problems",
            "problems",
            "reward",
        ]
        writer.writerow(["run", *(["group"] if groups else []), *(row["name"] for row in settings), *numbers])
        for k, run in enumerate(runs):
            row, measured = listed(run), run.measured()
            found = [measured and measured.get(key) for key in ("success", "scored", "problems")]
            results = [row["step"], row["success"], row["scored"], *found, row["reward"]]
            words = [row["name"], *groups[k : k + 1], *(each["values"][k] for each in settings)]
            writer.writerow([*map(_cell, words), *("" if value is None else value for value in results)])
        return Response(
            text.getvalue().encode("utf-8", "replace"),
            media_type="text/csv",
            headers={"content-disposition": 'attachment; filename="runs.csv"'},
        )


def _cell(value: object) -> str:
    """Return a value for a table that a spreadsheet may open: what would be a formula there becomes a text."""
    text = str(value)
    try:
        float(text)
    except ValueError:
        return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
    return text


def standings(
    runs: Sequence[ViewedRun], groups: Sequence[str], settings: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row for each run or group: its settings that differ, and its mean success with a 95 % interval over its runs."""
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
    """Return the different values of a group's runs: `0, 1, 2`, or the first ones of many."""
    texts = list(dict.fromkeys(map(str, values)))
    return ", ".join(texts[:6]) + (f" and {len(texts) - 6} more" if len(texts) > 6 else "")
