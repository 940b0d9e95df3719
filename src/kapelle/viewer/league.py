"""Analyses the games in the episodes of a run: the results of pairs of players, and the ratings computed from these results.

Results are read from the recorded episodes, curves of the pool from metrics, and exact values from the output of
`kapelle play --exact`. In self-play, each version of a policy meets only versions of the same training step, so the
games cannot show progress. Untrained opponents make the versions comparable. If a run has no untrained opponents, its
page shows a note.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kapelle.functional.ratings import linked, ratings
from kapelle.functional.statistics import wilson_interval
from kapelle.viewer.curves import CurveSource, page, width_of
from kapelle.viewer.library import AXES, MetricTable, ViewedRun
from kapelle.viewer.lines import number
from kapelle.viewer.skimming import FIXED, SkimmedPair, Tally

Met = Sequence[tuple[int, SkimmedPair, Tally]]
"""A sequence of results, each of which contains the step, the two players and the outcome of their games."""
ENTRANTS = 14
"""The approximate maximum number of players in one heat map. A trained player has one row for each range of its versions."""
FIXED_ENTRANTS = 20
"""The maximum number of untrained players in one heat map. The players with the most games are shown."""
RANGES = 6
"""The maximum number of version ranges of one player."""
EXACT = ("nash_conv", "exploitability")
MEMBERS = 14
"""The maximum number of members whose curves are shown. The members with the most recent values are shown."""
ENTERED = (
    "league/rating",
    "league/nash_conv",
    "league/nash_conv_mixture",
    "league/legal",
    "league/diversity",
)
"""The metrics that are recorded only at steps after which a member enters the pool."""
SECTIONS = {
    "Ladder": ("league/rating", "league/points", "league/return"),
    "Distance from an equilibrium": (*EXACT, "league/nash_conv"),
    "Pool and moves": (
        "league/members", "league/effective_members", "league/diversity", "league/legal", "league/invalid",
        "league/cross_play_gap",
    ),
}  # fmt: skip
TITLES = {
    "league/rating": "rating at each entry",
    "league/points": "share of points against each member",
    "league/nash_conv": "NashConv at each entry",
    "league/legal": "minimum probability of a legal move",
    "league/invalid": "share of invalid moves",
}

DESCRIBED = {
    "nash_conv": {
        "unit": "reward",
        "meaning": "Computed exactly by `kapelle play RUN --exact`: the sum of what each player could gain by a best response to this checkpoint. 0 at an equilibrium.",
        "known_as": "NashConv, twice the exploitability of two players",
    },
    "exploitability": {
        "unit": "reward",
        "meaning": "NashConv divided by the number of players: the average gain of a best response. 0 at an equilibrium.",
        "known_as": "exploitability",
    },
}  # fmt: skip
"""Descriptions of the panels that do not show metrics of a run."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """A player in the heat map, which is a policy over a range of versions or an untrained opponent."""

    name: str
    first: int = FIXED
    last: int = FIXED

    @property
    def label(self) -> str:
        """The name of the player on the page."""
        if self.first == FIXED:
            return self.name
        return f"{self.name} v{self.first}" + (f"–{self.last}" if self.last > self.first else "")


def in_order(name: str) -> list[str | int]:
    """Return a sort key that sorts numbers in names by value, so that `self@8` comes before `self@12`."""
    return [int(part) if k % 2 else part for k, part in enumerate(re.split(r"(\d+)", name[:80]))]


def opposed(met: Met) -> dict[str, list[tuple[int, SkimmedPair, Tally]]]:
    """Return, for each part, the results of the games in which one player wins what the other players lose."""
    parts: dict[str, list[tuple[int, SkimmedPair, Tally]]] = {}
    for row in met:
        parts.setdefault(row[1].part, []).append(row)
    return {
        part: rows
        for part, rows in sorted(parts.items())
        if sum(tally.wins + tally.losses for _, _, tally in rows) > sum(tally.unlike for _, _, tally in rows)
    }


def standing(rows: Met) -> dict[str, Any]:
    """Return the content that the page shows for one part.

    The content consists of the players, the cells of the heat map, and a ranking for each connected set of players.
    """
    games = Counter[str]()
    for _, pair, tally in rows:
        for name, version in ((pair.one, pair.one_version), (pair.other, pair.other_version)):
            if version == FIXED:
                games[name] += tally.wins + tally.draws + tally.losses
    omitted = {(name, FIXED) for name, _ in games.most_common()[FIXED_ENTRANTS:]}
    rows = [
        row
        for row in rows
        if not {(row[1].one, row[1].one_version), (row[1].other, row[1].other_version)} & omitted
    ]
    versions: dict[str, set[int]] = {}
    for _, pair, _ in rows:
        versions.setdefault(pair.one, set()).add(pair.one_version)
        versions.setdefault(pair.other, set()).add(pair.other_version)
    trained = [name for name, own in versions.items() if own != {FIXED}]
    ranges = max(1, min(RANGES, ENTRANTS // max(1, len(trained))))
    known = {version for name in trained for version in versions[name] if version != FIXED}
    start, end = min(known, default=0), max(known, default=0)
    width = -(-(end - start + 1) // ranges)

    def first_of(version: int) -> int:
        """Return the first version of the range that contains the given version."""
        return FIXED if version == FIXED else start + (version - start) // width * width

    entrants: list[Entrant] = []
    places: dict[tuple[str, int], int] = {}
    for name in sorted(versions, key=lambda each: (each not in trained, in_order(each))):
        for version in sorted(versions[name]):
            first = first_of(version)
            if (name, first) not in places:
                places[name, first] = len(entrants)
                last = FIXED if first == FIXED else min(end, first + width - 1)
                entrants.append(Entrant(name, first, last))
    results: dict[tuple[int, int], list[int]] = {}
    for _, pair, tally in rows:
        one = places[pair.one, first_of(pair.one_version)]
        other = places[pair.other, first_of(pair.other_version)]
        add_result(results, one, other, (tally.wins, tally.draws, tally.losses))
    between = {pair: (w, d, l) for pair, (w, d, l) in results.items() if pair[0] != pair[1]}  # noqa: E741
    sets = linked(len(entrants), between)
    shown = range(len(entrants) if sets and len(sets[0]) > 2 else 0)
    ladders = []
    for members in (own for own in sets if len(own) > 2):
        rated = ratings(members, between)
        least, most = min(each[1] for each in rated.values()), max(each[2] for each in rated.values())
        scale = 100 / ((most - least) or 1.0)
        count = {k: sum(sum(result) for pair, result in between.items() if k in pair) for k in members}
        ladders.append([
            {
                "name": entrants[k].label, "rating": middle, "low": low, "high": high, "games": count[k],
                "bar": [round(scale * (value - least), 1) for value in (low, middle, high)],
            }
            for k, (middle, low, high) in sorted(rated.items(), key=lambda item: -item[1][0])
        ])  # fmt: skip
    return {
        "entrants": [each.label for each in entrants],
        "cells": [[result_cell(entrants, results, k, n) for n in shown] for k in shown],
        "pairs": [] if shown else [result_cell(entrants, results, *pair) for pair in sorted(results)],
        "games": sum(sum(counts) for counts in results.values()),
        "ladders": ladders,
        "omitted": len(omitted),
        "apart": len(sets) > 1 or (bool(sets) and len(sets[0]) == 2),
        "self": sorted({entrants[k].name for k, n in results if k == n}),
    }


def add_result(
    results: dict[tuple[int, int], list[int]], one: int, other: int, counts: Sequence[int]
) -> None:
    """Add the wins, draws and losses of `one` against `other` to the results.

    The results contain each pair once, with the smaller number first.
    """
    kept = results.setdefault((min(one, other), max(one, other)), [0, 0, 0])
    for k, count in enumerate(counts if one <= other else reversed(counts)):
        kept[k] += count


def result_cell(
    entrants: Sequence[Entrant], results: Mapping[tuple[int, int], Sequence[int]], row: int, column: int
) -> dict[str, Any] | None:
    """Return the cell with the share of points of one player against another, or None if the two players never met."""
    counts = results.get((min(row, column), max(row, column)))
    if counts is None:
        return None
    wins, draws, losses = counts if row <= column else tuple(reversed(counts))
    games = wins + draws + losses
    share = (wins + draws / 2) / max(1, games)
    # Because a draw counts as half a point, the interval is too wide if many games are drawn.
    low, high = wilson_interval(round(wins + draws / 2), games)
    name = "the first role" if row == column else entrants[row].label
    words = f"{name} won {wins} of {games} games, {draws} draws: {100 * share:.0f} % of the points, {100 * low:.0f} to {100 * high:.0f} (95 %)"
    return {
        "share": share, "low": low, "high": high, "games": games, "words": words,
        "shade": "" if row == column else shade(2 * share - 1),
        "self": row == column, "one": entrants[row].label, "other": entrants[column].label,
    }  # fmt: skip


def shade(value: float) -> str:
    """Return the style class for the background of a cell, for a value between -1 and 1."""
    strength = min(6, round(6 * abs(value)))
    return f"{'p' if value > 0 else 'm'}{strength}" if strength else ""


def drawn(run: ViewedRun, exact: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the curves of the league page as plain JSON values: the metrics of the league, and exact values."""
    sources = [*_exact(run, exact), *_pool(run)]
    points = (name for source in sources for name in source.columns if name.startswith("league/points/"))
    members = [name.removeprefix("league/points/") for name in points]
    made = page(sources, agents=members, sections=SECTIONS)
    for section in made["sections"]:
        for panel in section["panels"]:
            panel.update(DESCRIBED.get(panel["name"], {}))
            panel["title"] = TITLES.get(panel["name"], panel["title"])
    made["sections"] = [section for section in made["sections"] if section["title"] != "More"]
    return {**made, "alone": True}


def _exact(run: ViewedRun, exact: Iterable[Mapping[str, Any]]) -> list[CurveSource]:
    """Return the curves of exploitability, from metrics and from the results of `kapelle play --exact`."""
    table = run.metrics
    columns = {name: column for name, column in table.columns.items() if name.partition("/")[0] in EXACT}
    sources = [CurveSource(run.key, run.path.name, table.axes, columns)] if columns else []
    parts: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for row in exact:
        step = number(row.get("step"))
        if step is not None:
            parts.setdefault(str(row.get("part") or ""), []).append((int(step), row))
    for part, rows in parts.items():
        own = sorted(rows, key=lambda each: each[0])
        values = {
            f"{name}/{part}" if part else name: [number(row.get(name)) for _, row in own] for name in EXACT
        }
        axes = _axes(table, [step for step, _ in own])
        sources.append(CurveSource(run.key, part or run.path.name, axes, values))
    return sources


def _pool(run: ViewedRun) -> list[CurveSource]:
    """Return the curves of the league's metrics, including those that are recorded only after a member has entered the pool."""
    table = run.metrics
    columns = {name: column for name, column in table.columns.items() if name.startswith("league/")}
    entered = {name: column for name, column in columns.items() if name in ENTERED}
    steps = [k for k in range(len(table)) if any(column[k] is not None for column in entered.values())]
    made = []
    if steps:

        def at(column: Sequence[float | None]) -> list[float | None]:
            return [column[k] for k in steps]

        middle = {name: at(column) for name, column in entered.items()}
        ends = [column for end in ("low", "high") if (column := columns.get(f"league/rating_{end}"))]
        low: dict[str, list[float | None]] = {}
        high: dict[str, list[float | None]] = {}
        if len(ends) == 2 and "league/rating" in middle:
            low, high = ({"league/rating": at(column)} for column in ends)
        axes = {axis: [places[k] for k in steps] for axis, places in table.axes.items()}
        made.append(CurveSource(run.key, run.path.name, axes, middle, low, high, rows=len(steps)))
    own = {name: column for name, column in columns.items() if name not in ENTERED and "/rating_" not in name}
    # Members that left the pool long ago have no values at the end.
    newest = [name for name in own if name.startswith("league/points/")]
    newest.sort(
        key=lambda name: -max((k for k, value in enumerate(own[name]) if value is not None), default=0)
    )
    kept = {name: column for name, column in own.items() if name not in newest[MEMBERS:]}
    if kept:
        axes, thinned = table.thinned(width_of(len(table)), kept)
        made.append(CurveSource(run.key, run.path.name, axes, thinned, rows=len(table)))
    return made


def _axes(table: MetricTable, steps: Sequence[int]) -> dict[str, list[float]]:
    """Return the positions of the given steps on every axis. The position is 0 for a step that is not in the table."""
    places = {step: k for k, step in enumerate(table.axes["step"])}
    found = [places.get(step) for step in steps]
    others = {axis: [0.0 if k is None else table.axes[axis][k] for k in found] for axis in AXES}
    return others | {"step": [float(step) for step in steps]}
