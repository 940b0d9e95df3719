"""The league of a run: who played whom, who won, and the ratings that follow.

Who played whom follows from the recorded episodes; curves of the pool from its metrics, exact values from `kapelle play --exact`, arenas from
their folders. In self-play, each version meets only versions of the same training step, and such
games cannot show whether play got better. Opponents that do not learn link the versions; the page of a run without such
opponents says so.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kapelle.functional.ratings import linked, ratings
from kapelle.functional.statistics import wilson_interval
from kapelle.runtime.files import plain_bytes
from kapelle.viewer.curves import CurveSource, page, width_of
from kapelle.viewer.library import AXES, MetricTable, ViewedRun
from kapelle.viewer.lines import listing, mapping, number, text, whole
from kapelle.viewer.skimming import FIXED, SkimmedPair, Tally

Met = Sequence[tuple[int, SkimmedPair, Tally]]
ENTRANTS = 14
"""About the most players of one heat map, in which a learner has one row for each range of its versions."""
FIXED_ENTRANTS = 20
"""Most players of one heat map that do not learn: those with most games."""
PAIRS = 14
"""Most curves of won games: those of the pairs with most games."""
RANGES = 6
"""Most ranges of one learner's versions."""
POINTS = 40
"""Most points of a curve of won games."""
EXACT = ("nash_conv", "exploitability")
MEMBERS = 14
"""Most curves of members: those with the newest numbers."""
ENTERED = (
    "league/rating",
    "league/nash_conv",
    "league/nash_conv_mixture",
    "league/legal",
    "league/diversity",
)
"""Metrics of the steps after which somebody enters."""
SECTIONS = {
    "Ladder": ("league/rating", "league/points", "league/return"),
    "Who wins": ("points",),
    "How far from an equilibrium": (*EXACT, "league/nash_conv"),
    "Pool and moves": (
        "league/members", "league/effective_members", "league/diversity", "league/legal", "league/invalid",
        "league/cross_play_gap",
    ),
}  # fmt: skip
TITLES = {
    "points": "share of points won",
    "league/rating": "rating at each entry",
    "league/points": "share of points against each member",
    "league/nash_conv": "NashConv at each entry",
    "league/legal": "least probability of a legal move",
    "league/invalid": "share of invalid moves",
}

DESCRIBED = {
    "points": {
        "unit": "with 95 % intervals",
        "meaning": "Of the games between two players: wins, and half of the draws. In self-play both sides learn, so half of the points may hide progress of both.",
        "known_as": "win rate, a draw counting half",
    },
    "nash_conv": {
        "unit": "reward",
        "meaning": "Computed exactly by `kapelle play RUN --exact`: what all players together could gain by best responses to this checkpoint. 0 at an equilibrium.",
        "known_as": "NashConv, twice the exploitability of two players",
    },
    "exploitability": {
        "unit": "reward",
        "meaning": "NashConv over the number of players: what a best response gains on average. 0 at an equilibrium.",
        "known_as": "exploitability",
    },
}  # fmt: skip
"""What this page computes and no metric of a run is: panel → its description."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """A player of the heat map: a policy over a range of versions, or an opponent that does not learn."""

    name: str
    first: int = FIXED
    last: int = FIXED

    @property
    def label(self) -> str:
        """What it is called on the page."""
        if self.first == FIXED:
            return self.name
        return f"{self.name} v{self.first}" + (f"–{self.last}" if self.last > self.first else "")


def in_order(name: str) -> list[str | int]:
    """Return what names are sorted by: `self@8` comes before `self@12`."""
    return [int(part) if k % 2 else part for k, part in enumerate(re.split(r"(\d+)", name[:80]))]


def opposed(met: Met) -> dict[str, list[tuple[int, SkimmedPair, Tally]]]:
    """Return, by part, the meetings in which one wins what others lose."""
    parts: dict[str, list[tuple[int, SkimmedPair, Tally]]] = {}
    for row in met:
        parts.setdefault(row[1].part, []).append(row)
    return {
        part: rows
        for part, rows in sorted(parts.items())
        if sum(tally.wins + tally.losses for _, _, tally in rows) > sum(tally.unlike for _, _, tally in rows)
    }


def standing(rows: Met) -> dict[str, Any]:
    """Return what the page shows of one part: entrants, the heat map's cells, and a ladder for each linked set."""
    met = Counter[str]()
    for _, pair, tally in rows:
        for name, version in ((pair.one, pair.one_version), (pair.other, pair.other_version)):
            if version == FIXED:
                met[name] += tally.wins + tally.draws + tally.losses
    omitted = {name for name, _ in met.most_common()[FIXED_ENTRANTS:]}
    rows = [
        row
        for row in rows
        if (row[1].one_version != FIXED or row[1].one not in omitted)
        and (row[1].other_version != FIXED or row[1].other not in omitted)
    ]
    versions: dict[str, set[int]] = {}
    for _, pair, _ in rows:
        versions.setdefault(pair.one, set()).add(pair.one_version)
        versions.setdefault(pair.other, set()).add(pair.other_version)
    learners = [name for name, own in versions.items() if own != {FIXED}]
    ranges = max(1, min(RANGES, ENTRANTS // max(1, len(learners))))
    known = {version for name in learners for version in versions[name] if version != FIXED}
    start, end = min(known, default=0), max(known, default=0)
    width = -(-(end - start + 1) // ranges)
    entrants: list[Entrant] = []
    at: dict[tuple[str, int], int] = {}
    for name in sorted(versions, key=lambda each: (each not in learners, in_order(each))):
        for version in sorted(versions[name]):
            first = FIXED if version == FIXED else start + (version - start) // width * width
            if (name, first) not in at:
                at[name, first] = len(entrants)
                entrants.append(
                    Entrant(name) if version == FIXED else Entrant(name, first, min(end, first + width - 1))
                )

    def place(name: str, version: int) -> int:
        return at[name, FIXED if version == FIXED else start + (version - start) // width * width]

    results: dict[tuple[int, int], list[int]] = {}
    for _, pair, tally in rows:
        one, other = place(pair.one, pair.one_version), place(pair.other, pair.other_version)
        counts = [tally.wins, tally.draws, tally.losses]
        kept = results.setdefault((min(one, other), max(one, other)), [0, 0, 0])
        for k, count in enumerate(counts if one <= other else reversed(counts)):
            kept[k] += count
    between = {pair: (w, d, l) for pair, (w, d, l) in results.items() if pair[0] != pair[1]}  # noqa: E741
    sets = linked(len(entrants), between)
    places = range(len(entrants) if sets and len(sets[0]) > 2 else 0)
    ladders = []
    for members in (own for own in sets if len(own) > 2):
        rated = ratings(members, between)
        least, most = min(each[1] for each in rated.values()), max(each[2] for each in rated.values())
        scale = 100 / ((most - least) or 1.0)
        games = {k: sum(sum(result) for pair, result in between.items() if k in pair) for k in members}
        ladders.append([
            {
                "name": entrants[k].label, "rating": middle, "low": low, "high": high, "games": games[k],
                "bar": [round(scale * (value - least), 1) for value in (low, middle, high)],
            }
            for k, (middle, low, high) in sorted(rated.items(), key=lambda item: -item[1][0])
        ])  # fmt: skip
    return {
        "entrants": [each.label for each in entrants],
        "cells": [[result_cell(entrants, results, k, n) for n in places] for k in places],
        "pairs": [] if places else [result_cell(entrants, results, *pair) for pair in sorted(results)],
        "games": sum(sum(counts) for counts in results.values()),
        "ladders": ladders,
        "omitted": len(omitted),
        "apart": len(sets) > 1 or (bool(sets) and len(sets[0]) == 2),
        "self": sorted({entrants[k].name for k, n in results if k == n}),
    }


def result_cell(
    entrants: Sequence[Entrant], results: Mapping[tuple[int, int], Sequence[int]], row: int, column: int
) -> dict[str, Any] | None:
    """Return one entrant's share of the points against another; `results` have each pair once, the smaller number first."""
    counts = results.get((min(row, column), max(row, column)))
    if counts is None:
        return None
    wins, draws, losses = counts if row <= column else tuple(reversed(counts))
    share, low, high = share_of(wins, draws, losses)
    who = "the first seat" if row == column else entrants[row].label
    words = f"{who} won {wins} of {wins + draws + losses} games, {draws} draws: {100 * share:.0f} % of the points, {100 * low:.0f} to {100 * high:.0f} (95 %)"
    return {
        "share": share, "low": low, "high": high, "games": wins + draws + losses, "words": words,
        "shade": "" if row == column else shade(2 * share - 1),
        "self": row == column, "one": entrants[row].label, "other": entrants[column].label,
    }  # fmt: skip


def shade(value: float) -> str:
    """Return the ground of a cell for a number from -1 to 1, as a class of the style sheet."""
    strength = min(6, round(6 * abs(value)))
    return f"{'p' if value > 0 else 'm'}{strength}" if strength else ""


def share_of(wins: int, draws: int, losses: int) -> tuple[float, float, float]:
    """Return the share of points, half of one for a draw, with a 95 % interval that is too wide if many games are drawn."""
    count = wins + draws + losses
    low, high = wilson_interval(round(wins + draws / 2), count)
    return (wins + draws / 2) / max(1, count), low, high


def drawn(run: ViewedRun, met: Met, exact: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the curves of the page, as JSON: points won by step, and how exploitable the policies are."""
    sources = [*_won(run, met), *_exact(run, exact), *_pool(run)]
    points = (name for source in sources for name in source.columns if name.startswith("league/points/"))
    members = [name.removeprefix("league/points/") for name in points]
    made = page(sources, agents=members, sections=SECTIONS)
    for section in made["sections"]:
        for panel in section["panels"]:
            panel.update(DESCRIBED.get(panel["name"], {}))
            panel["title"] = TITLES.get(panel["name"], panel["title"])
    made["sections"] = [section for section in made["sections"] if section["title"] != "More"]
    return {**made, "alone": True}


def _won(run: ViewedRun, met: Met) -> list[CurveSource]:
    """Return one source for each part: points of each pair of names over ranges of steps.

    Without those against members of a league, which have curves of their own.
    """
    sources = []
    members = {f"league/points/{name}" for _, pair, _ in met for name in (pair.one, pair.other)}
    members = {name.removeprefix("league/points/") for name in members & run.metrics.columns.keys()}
    for part, rows in opposed(met).items():
        steps = sorted({step for step, _, _ in rows})
        width = -(-len(steps) // POINTS)
        ends = [steps[min(k + width, len(steps)) - 1] for k in range(0, len(steps), width)]
        bucket = {step: k // width for k, step in enumerate(steps)}
        counts: dict[str, list[list[int]]] = {}
        for step, pair, tally in rows:
            if pair.one in members or pair.other in members:
                continue
            own = [tally.wins, tally.draws, tally.losses]
            name = f"points/{pair.one} against {pair.other}"
            if pair.one == pair.other:
                name = f"points/{pair.one} in the first seat"
            elif pair.one > pair.other:
                name, own = f"points/{pair.other} against {pair.one}", own[::-1]
            kept = counts.setdefault(f"{name}{', ' if part else ''}{part}", [[0, 0, 0] for _ in ends])[
                bucket[step]
            ]
            for k, count in enumerate(own):
                kept[k] += count
        most = sorted(counts, key=lambda name: -sum(map(sum, counts[name])))[:PAIRS]
        counts = {name: own for name, own in counts.items() if name in most}
        shares = {
            name: [share_of(*each) if sum(each) else (None,) * 3 for each in own]
            for name, own in counts.items()
        }
        middle, low, high = (
            {name: [each[k] for each in own] for name, own in shares.items()} for k in range(3)
        )
        sources.append(
            CurveSource(
                run.key, part or run.path.name, _axes(run.metrics, ends), middle, low, high, rows=len(ends)
            )
        )
    return sources


def _exact(run: ViewedRun, exact: Iterable[Mapping[str, Any]]) -> list[CurveSource]:
    """Return sources of exploitability: from metrics, and from the results of `kapelle play --exact`."""
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
        sources.append(
            CurveSource(run.key, part or run.path.name, _axes(table, [step for step, _ in own]), values)
        )
    return sources


def _pool(run: ViewedRun) -> list[CurveSource]:
    """Return sources of a league's metrics: those of every step, and those of the steps after which somebody enters."""
    table = run.metrics
    columns = {name: column for name, column in table.columns.items() if name.startswith("league/")}
    entered = {name: column for name, column in columns.items() if name in ENTERED}
    steps = [k for k in range(len(table)) if any(column[k] is not None for column in entered.values())]
    made = []
    if steps:

        def at(column: Sequence[float | None]) -> list[float | None]:
            return [column[k] for k in steps]

        middle = {name: at(column) for name, column in entered.items()}
        ends = {}
        for end in ("low", "high"):
            column = columns.get(f"league/rating_{end}")
            ends[end] = {"league/rating": at(column)} if column and "league/rating" in middle else {}
        both = ends if all(ends.values()) else {"low": {}, "high": {}}
        axes = {axis: [places[k] for k in steps] for axis, places in table.axes.items()}
        made.append(
            CurveSource(run.key, run.path.name, axes, middle, both["low"], both["high"], rows=len(steps))
        )
    own = {name: column for name, column in columns.items() if name not in ENTERED and "/rating_" not in name}
    # Those who left a long time ago have no numbers at the end.
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
    """Return the places of these steps on every axis; 0 for a step that the table lacks."""
    places = {step: k for k, step in enumerate(table.axes["step"])}
    found = [places.get(step) for step in steps]
    others = {axis: [0.0 if k is None else table.axes[axis][k] for k in found] for axis in AXES}
    return others | {"step": [float(step) for step in steps]}


# -------- Arenas (`kapelle arena`) in which a checkpoint of the run took part: `arena.json` in a folder beside the run, or in it

ARENAS = 5
"""Most arenas of one page, the newest first."""
PLAYERS = 60
"""Most players of an arena that is shown."""
LARGEST = 8_000_000
"""Most bytes of a file that is read."""


def arenas(run: Path) -> list[dict[str, Any]]:
    """Return what the page shows of each arena that the run took part in, the newest first; damaged files are left out."""
    files = []
    for file in (*run.parent.glob("*/arena.json"), *run.glob("*/arena.json")):
        try:
            state = file.stat()
        except OSError:
            continue
        if state.st_size <= LARGEST:
            files.append((state.st_mtime, file))
    found = []
    for _, file in sorted(files, reverse=True):
        try:
            row = mapping(json.loads(plain_bytes(file)))
        except (OSError, ValueError, RecursionError):
            continue
        players = [mapping(each) for each in listing(row.get("players"))]
        if any(each.get("run") == run.name for each in players) and len(players) <= PLAYERS:
            found.append(_arena(file.parent.name, row, players))
        if len(found) == ARENAS:
            break
    return found


def _arena(name: str, row: Mapping[str, Any], players: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    lines = [listing(line) for line in listing(row.get("payoffs"))]

    def payoff(k: int, n: int) -> Mapping[str, Any]:
        line = lines[k] if k < len(lines) else []
        return mapping(line[n]) if n < len(line) else {}

    together = row.get("together") is True
    rated = []
    for k, player in enumerate(players):
        own = mapping(player.get("cross_play" if together else "elo"))
        middle, low, high = (
            number(own.get(key)) for key in ("mean" if together else "rating", "low", "high")
        )
        rated.append((k, middle, low, high))
    order = sorted(rated, key=lambda each: (each[1] is None, -(each[1] or 0.0)))
    ends = [value for _, middle, low, high in rated for value in (middle, low, high) if value is not None]
    least, scale = min(ends, default=0.0), 100 / ((max(ends, default=0.0) - min(ends, default=0.0)) or 1.0)
    means = [number(payoff(k, n).get("mean")) for k in range(len(players)) for n in range(len(players))]
    most = max((abs(value) for value in means if value is not None), default=0.0) or 1.0
    labels = [text(each.get("label")) for each in players]

    def cell(k: int, n: int) -> dict[str, Any] | None:
        found = payoff(k, n)
        mean = number(found.get("mean"))
        if mean is None:
            return None
        low, high = number(found.get("low")), number(found.get("high"))
        ends = "" if low is None or high is None else f", {low:+.3f} to {high:+.3f} (95 %)"
        return {
            "mean": mean,
            "deals": whole(found.get("deals")),
            "shade": shade(mean / most),
            "words": f"{labels[k]} earns {mean:+.3f} from {labels[n]}{ends}" if k != n else f"{labels[k]} with itself: {mean:+.3f}{ends}",
        }  # fmt: skip

    rows = []
    for k, middle, low, high in order:
        skill = mapping(players[k].get("openskill"))
        mu, upper = number(skill.get("rating")), number(skill.get("high"))
        bar = None
        if middle is not None:
            drawn = (middle if low is None else low, middle, middle if high is None else high)
            bar = [round(scale * (value - least), 1) for value in drawn]
        rows.append({
            "name": labels[k], "rating": middle, "low": low, "high": high, "bar": bar,
            "openskill": None if mu is None or upper is None else (mu, upper - mu),
            "shares": [number(players[k].get(key)) for key in ("nash_average", "alpha_rank")],
            "self_play": number(mapping(players[k].get("self_play")).get("mean")),
            "invalid": number(players[k].get("invalid")),
            "turns": whole(players[k].get("turns")),
            "cells": [cell(k, n) for n, *_ in order],
        })  # fmt: skip
    gap = mapping(row.get("gap"))
    return {
        "name": name,
        "game": text(row.get("environment")),
        "deals": whole(row.get("deals")) or 0,
        "together": together,
        "rows": rows,
        "cycle": [text(each) for each in listing(row.get("cycle"))],
        "gap": [number(gap.get(key)) for key in ("mean", "low", "high")],
    }
