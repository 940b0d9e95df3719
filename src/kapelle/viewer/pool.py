"""The pool of a run's league: its members, their ratings, and their payoffs against one another.

When a member enters, a run writes the pool's state to `league/NAME/standing.json`. Damaged files raise no error: the page lists
what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, FiniteFloat, StringConstraints, TypeAdapter
from typing_extensions import TypedDict

from kapelle.runtime.files import plain_bytes
from kapelle.viewer.league import Entrant, add_result, in_order, result_cell, shade
from kapelle.viewer.library import ViewedRun
from kapelle.viewer.lines import mapping, whole

MEMBERS = 40
"""Most members of one table."""
ENTRIES = 300
"""Most files of entries that are read, the most recently changed ones."""
LARGEST, ALTOGETHER = 2_000_000, 20_000_000
"""Most bytes of one of them, and of all."""
HIGHEST = 1e6
"""Largest valid rating, in points on Elo's scale."""
LEAGUE = "league/"
KINDS = {"past": "past self", "policy": "policy", "player": "player of the game"}


@dataclass(slots=True)
class EntryStanding:
    """The state of a pool when a member entered."""

    step: int
    member: str
    """The new member."""
    members: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    """Name → kind, and step of the entry."""
    ratings: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Rating and the ends of its interval."""
    payoffs: dict[tuple[str, str], float] = field(default_factory=dict)
    """Member, the others' member → its mean return."""
    payoff_games: dict[tuple[str, str], int] = field(default_factory=dict)
    """Number of games of a payoff, 0 if it was computed exactly; absent if a run did not record it."""
    results: dict[tuple[str, str], tuple[int, int, int]] = field(default_factory=dict)
    """New member, opponent → wins, draws, losses."""
    strategy: dict[str, dict[str, float]] = field(default_factory=dict)
    """Agent → member → the probability that it is drawn."""
    damaged: set[str] = field(default_factory=set)
    """Names of missing or invalid parts."""


def entry_of(raw: bytes) -> EntryStanding | None:
    """Return the content of a file, without damaged parts; None if it has no step or member."""
    try:
        row = mapping(json.loads(raw))
    except (ValueError, RecursionError):
        return None
    step, member = whole(row.get("step")), row.get("member")
    if step is None or step < 0 or not isinstance(member, str) or not member:
        return None
    made = EntryStanding(step, member[:80])
    for part, form in _parts().items():
        try:
            found = form.validate_json(json.dumps(row.get(part)), strict=True)
        except ValueError:
            made.damaged.add(part)
            continue
        if part == "members":
            made.members = {each["name"]: (KINDS[each["kind"]], each.get("step")) for each in found}
        elif part == "results":
            made.results = {(one, other): tuple(counts) for one, other, *counts in found}
        elif part == "ratings":
            made.ratings = found
        elif part == "strategy":
            made.strategy = found
        elif found is not None:
            names = found["names"]
            made.payoffs = _squared(names, found["table"])
            made.payoff_games = _squared(names, found.get("games") or [])
            if len(made.payoffs) != len(names) ** 2 or not names:
                made.damaged.add(part)
                made.payoffs, made.payoff_games = {}, {}
    return made


def _squared(names: Sequence[str], table: Sequence[Sequence[Any]]) -> dict[tuple[str, str], Any]:
    """Return the entries of a square table by the names of row and column; empty for another shape."""
    if [len(line) for line in table] != [len(names)] * len(names):
        return {}
    return {
        (one, other): value
        for one, line in zip(names, table, strict=True)
        for other, value in zip(names, line, strict=True)
        if value is not None
    }


Name = Annotated[str, StringConstraints(min_length=1, max_length=80)]
Rating = Annotated[float, Field(ge=-HIGHEST, le=HIGHEST)]


def _ordered(rating: tuple[float, float, float]) -> tuple[float, float, float]:
    middle, low, high = rating
    if not low <= middle <= high:
        raise ValueError("a rating outside of its interval")
    return rating


Chance = Annotated[float, Field(ge=-1e-9, le=1 + 1e-9)]
Games = Annotated[int, Field(ge=0, lt=2**53)]


class _Entrant(TypedDict):
    name: Name
    kind: Literal["past", "policy", "player"]
    step: NotRequired[int | None]


class _Payoffs(TypedDict):
    names: list[Name]
    table: list[list[FiniteFloat]]
    games: NotRequired[list[list[Games | None]] | None]


@cache
def _parts() -> dict[str, TypeAdapter[Any]]:
    """Return the form of each part of a standing."""
    forms: dict[str, Any] = {
        "members": list[_Entrant],
        "ratings": dict[Name, Annotated[tuple[Rating, Rating, Rating], AfterValidator(_ordered)]],
        "results": list[tuple[Name, Name, Games, Games, Games]],
        "strategy": dict[Name, dict[Name, Chance]],
        "payoffs": _Payoffs | None,
    }
    return {part: TypeAdapter(form) for part, form in forms.items()}


def read_entries(run: Path, last: float) -> tuple[list[EntryStanding], list[str]]:
    """Return the entries up to a step in order, and the names of damaged ones.

    Files of later steps may remain from before a rollback.
    """
    files = []
    with suppress(OSError):
        for folder in (run / "league").iterdir():
            with suppress(OSError):
                about = (folder / "standing.json").stat()
                files.append((about.st_mtime_ns, about.st_size, folder))
    found: list[tuple[int, int, EntryStanding]] = []
    damaged, left = [], ALTOGETHER
    for changed, size, folder in sorted(files, reverse=True)[:ENTRIES]:
        entry = None
        if size <= min(LARGEST, left):
            left -= size
            with suppress(OSError):
                entry = entry_of(plain_bytes(folder / "standing.json"))
        if entry is None:
            damaged.append(folder.name)
        elif entry.step <= last:
            found.append((entry.step, changed, entry))
    return [entry for *_, entry in sorted(found, key=lambda each: each[:2])], damaged


def pool(run: ViewedRun) -> dict[str, Any] | None:
    """Return what the page shows of a run's pool; None for a run without a league."""
    with run.lock:
        run.refresh()
        table, settings = run.metrics, run.settings().get("league")
        last = table.axes["step"][-1] if len(table) else 0.0
        points = {
            name.removeprefix(f"{LEAGUE}points/"): next(
                (value for value in reversed(column) if value is not None), None
            )
            for name, column in table.columns.items()
            if name.startswith(f"{LEAGUE}points/")
        }
        has_league = isinstance(settings, Mapping) or any(name.startswith(LEAGUE) for name in table.columns)
    if not has_league:
        return None
    entries, damaged = read_entries(run.path, last)
    newest = entries[-1] if entries else EntryStanding(0, "")
    # Games may not link an exploiter to other members; then the ratings of an earlier entry still hold.
    rated = next((entry for entry in reversed(entries) if entry.ratings), newest)
    missing = []
    if not entries:
        missing.append("There is no standing.json: no member has entered yet. The pool is unknown here.")
    elif newest.damaged:
        missing.append(
            f"In the standing.json of {newest.member} {', '.join(sorted(newest.damaged))} are damaged or missing."
        )
    if damaged:
        missing.append(
            f"{len(damaged)} standing.json cannot be read or {'is' if len(damaged) == 1 else 'are'} damaged: "
            f"{', '.join(sorted(damaged)[:8])}{', …' if len(damaged) > 8 else ''}."
        )
    return {
        "step": newest.step,
        "entrant": newest.member,
        "rated": rated.member if rated is not newest else "",
        "members": _members(entries, newest, rated, points),
        "matrix": _matrix(newest),
        "missing": missing,
    }


def _members(
    entries: Sequence[EntryStanding],
    newest: EntryStanding,
    rated: EntryStanding,
    points: Mapping[str, float | None],
) -> list[dict[str, Any]]:
    """Return a row for each member, current members by rating, then former ones."""
    about = {name: each for entry in entries for name, each in entry.members.items()}
    former = {*about, *points} - {*newest.members, ""}
    names = [*newest.members, *sorted(former, key=in_order, reverse=True)]
    ends = [end for name, own in rated.ratings.items() if name in names for end in own]
    least, most = min(ends, default=0.0), max(ends, default=0.0)
    scale = 100 / ((most - least) or 1.0)
    rows: list[dict[str, Any]] = []
    for name in names:
        kind, step = about.get(name, ("", None))
        rating = rated.ratings.get(name)
        # A learner enters as its past selves: `NAME@STEP`.
        learns = name.endswith(" on its way") or any(each.startswith(f"{name}@") for each in names)
        chances = [own.get(name, 0.0) for own in newest.strategy.values()]
        is_member = name in newest.members
        rows.append({
            "name": name,
            "kind": "learner" if learns and not kind else kind,
            "entered": step if kind == KINDS["past"] else None,
            "always": kind in (KINDS["policy"], KINDS["player"]),
            "here": is_member,
            "left": bool(newest.members) and not learns and not is_member,
            "rating": rating,
            "bar": rating and [round(scale * (value - least), 1) for value in (rating[1], rating[0], rating[2])],
            "points": points.get(name),
            "chance": fmean(chances) if chances and is_member else None,
        })  # fmt: skip
    rows.sort(
        key=lambda row: (not row["here"], row["rating"] is None, -row["rating"][0] if row["rating"] else 0.0)
    )
    return rows[:MEMBERS]


def _matrix(newest: EntryStanding) -> dict[str, Any] | None:
    """Return the table of payoffs; without one, the table of the members' games before they entered."""
    if newest.payoffs:
        names = list(dict.fromkeys(one for one, _ in newest.payoffs))[:MEMBERS]
        most = max(map(abs, newest.payoffs.values())) or 1.0

        def payoff(one: str, other: str) -> dict[str, Any] | None:
            value = newest.payoffs.get((one, other))
            if value is None:
                return None
            games = newest.payoff_games.get((one, other))
            counted = "" if games is None else f", in {games:,} games" if games else ", computed exactly"
            words = f"{one} earns {value:+.3f} on average where the others are {other}{counted}"
            return {"value": value, "shade": shade(value / most), "words": words, "games": games or None}

        return {
            "payoffs": True,
            "exact": 0 in newest.payoff_games.values(),
            "games": any(newest.payoff_games.values()),
            "names": names,
            "rows": [[payoff(one, other) for other in names] for one in names],
        }
    games = {pair: counts for pair, counts in newest.results.items() if pair[0] != pair[1] and any(counts)}
    order = [*newest.members, *(name for pair in games for name in pair)]
    names = [name for name in dict.fromkeys(order) if any(name in pair for pair in games)][:MEMBERS]
    place = {name: k for k, name in enumerate(names)}
    results: dict[tuple[int, int], list[int]] = {}
    for (one, other), counts in games.items():
        if one in place and other in place:
            add_result(results, place[one], place[other], counts)
    entrants = [Entrant(name) for name in names]
    rows = [[result_cell(entrants, results, k, n) for n in range(len(names))] for k in range(len(names))]
    return {"payoffs": False, "names": names, "rows": rows} if results else None
