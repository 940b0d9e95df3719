"""The pool of a run's league: who is a member and how strong, what members earn from one another, who was drawn, and the meta-strategy.

At each entry a run writes what it knows then into `league/NAME/standing.json`; who was drawn is in its episodes. Whatever these
files hold, reading them raises no error, and the page says what is missing.
"""

from __future__ import annotations

import json
from collections import Counter
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
from kapelle.viewer.league import Entrant, in_order, result_cell, shade
from kapelle.viewer.library import ViewedRun
from kapelle.viewer.lines import mapping, whole

MEMBERS = 40
"""Most members of one table."""
COLUMNS = 12
"""Most ranges of steps, or entries, of one table."""
ENTRIES = 300
"""Most files of entries that are read, those that were changed last first."""
LARGEST, ALTOGETHER = 2_000_000, 20_000_000
"""Most bytes of one of them, and of all."""
HIGHEST = 1e6
"""Points of Elo's scale beyond which a rating is none."""
LEAGUE = "league/"
KINDS = {"past": "past self", "policy": "policy", "player": "player of the game"}
ITSELF = "itself"


@dataclass(slots=True)
class EntryStanding:
    """What was known of a pool when somebody entered."""

    step: int
    member: str
    """Who entered."""
    members: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    """Kind, and the step of the entry, by name."""
    ratings: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Rating and the ends of its interval."""
    payoffs: dict[tuple[str, str], float] = field(default_factory=dict)
    """Member, the others' member → what it returns on average."""
    payoff_games: dict[tuple[str, str], int] = field(default_factory=dict)
    """Games that a payoff is the mean of, 0 for one that was computed exactly; absent where a run did not keep them."""
    results: dict[tuple[str, str], tuple[int, int, int]] = field(default_factory=dict)
    """Who entered, whom it had met → wins, draws, losses."""
    strategy: dict[str, dict[str, float]] = field(default_factory=dict)
    """Agent → member → the chance that it is drawn."""
    damaged: set[str] = field(default_factory=set)
    """Parts that are missing or hold something else."""


def entry_of(raw: bytes) -> EntryStanding | None:
    """Return what a file says, without what is damaged; None if it does not say who entered when."""
    try:
        row = mapping(json.loads(raw))
    except (ValueError, RecursionError):
        return None
    step, member = whole(row.get("step")), _name(row.get("member"))
    if step is None or step < 0 or not member:
        return None
    made = EntryStanding(step, member)
    # A part that holds something else is left out as a whole.
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
            names, games = found["names"], found.get("games") or []
            made.payoffs = _squared(names, found["table"])
            made.payoff_games = _squared(names, games)
            if len(made.payoffs) != len(names) ** 2 or not names:
                made.damaged.add(part)
                made.payoffs, made.payoff_games = {}, {}
    return made


def _squared(names: Sequence[str], table: Sequence[Sequence[Any]]) -> dict[tuple[str, str], Any]:
    """Return the entries of a square table by the names of its rows and columns; empty where it is no square."""
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


def _name(value: object) -> str:
    return value[:80] if isinstance(value, str) else ""


def _by_entry(name: str) -> tuple[int, list[str | int]]:
    """Return what members are sorted by where no file says when they entered: the step that their name ends with."""
    step = name.rpartition("@")[2]
    return int(step) if step.isdecimal() else -1, in_order(name)


def read_entries(run: Path, last: float) -> tuple[list[EntryStanding], list[str]]:
    """Return what is known of the pool at each entry up to a step, in their order, and which entries' files are damaged.

    Of later steps are what a run has left that was taken back.
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


def pool(run: ViewedRun, draws: Sequence[tuple[int, str, int]]) -> dict[str, Any] | None:
    """Return what the page shows of a run's pool; None for a run without a league. `draws` are `Tables.drawn`."""
    with run.lock:
        run.refresh()
        table, said = run.metrics, run.settings().get("league")
        last = table.axes["step"][-1] if len(table) else 0.0
        points = {
            name.removeprefix(f"{LEAGUE}points/"): next(
                (value for value in reversed(column) if value is not None), None
            )
            for name, column in table.columns.items()
            if name.startswith(f"{LEAGUE}points/")
        }
        known = isinstance(said, Mapping) or any(name.startswith(LEAGUE) for name in table.columns)
    if not known:
        return None
    entries, damaged = read_entries(run.path, last)
    newest = entries[-1] if entries else EntryStanding(0, "")
    # An exploiter may have met nobody whom games link to the others; the ratings of the entry before it still hold.
    rated = next((entry for entry in reversed(entries) if entry.ratings), newest)
    # Episodes name a player of the game as the game does; the pool names it as the settings do.
    ours = {
        plays: name for name, plays in mapping(mapping(said).get("members")).items() if isinstance(plays, str)
    }
    draws = [(step, ours.get(name, name), tasks) for step, name, tasks in draws]
    missing = []
    if not entries:
        missing.append(
            "No entry has left a standing.json: nobody has entered yet, or the run is older than this file. "
            "Who is in the pool, ratings, results and chances are not known here."
        )
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
        "members": _members(entries, newest, rated, points, draws),
        "matrix": _matrix(newest),
        "draws": _draws(draws),
        "strategies": _strategies(entries),
        "psro": mapping(mapping(said).get("population")).get("name") == "psro"
        or mapping(said).get("population") == "psro",
        "missing": missing,
    }


def _members(
    entries: Sequence[EntryStanding],
    newest: EntryStanding,
    rated: EntryStanding,
    points: Mapping[str, float | None],
    draws: Sequence[tuple[int, str, int]],
) -> list[dict[str, Any]]:
    """Return a row for each member, those of now by rating, then those who have left."""
    about = {name: each for entry in entries for name, each in entry.members.items()}
    met = Counter[str]()
    for _, name, tasks in draws:
        met[name] += tasks
    gone = {*about, *points, *met} - {*newest.members, ""}
    names = [*newest.members, *sorted(gone, key=_by_entry, reverse=True)]
    ends = [end for name, own in rated.ratings.items() if name in names for end in own]
    least, most = min(ends, default=0.0), max(ends, default=0.0)
    scale = 100 / ((most - least) or 1.0)
    rows: list[dict[str, Any]] = []
    for name in names:
        kind, step = about.get(name, ("", None))
        rating = rated.ratings.get(name)
        learns = name.endswith(" on its way") or any(each.startswith(f"{name}@") for each in names)
        chances = [own.get(name, 0.0) for own in newest.strategy.values()]
        rows.append({
            "name": name,
            "kind": "learner" if learns and not kind else kind,
            "entered": step if kind == KINDS["past"] else None,
            "always": kind in (KINDS["policy"], KINDS["player"]),
            "here": name in newest.members,
            "left": bool(newest.members) and not learns and name not in newest.members,
            "rating": rating,
            "bar": rating and [round(scale * (value - least), 1) for value in (rating[1], rating[0], rating[2])],
            "points": points.get(name),
            "tasks": met[name],
            "chance": fmean(chances) if chances and name in newest.members else None,
        })  # fmt: skip
    rows.sort(
        key=lambda row: (not row["here"], row["rating"] is None, -row["rating"][0] if row["rating"] else 0.0)
    )
    return rows[:MEMBERS]


def _matrix(newest: EntryStanding) -> dict[str, Any] | None:
    """Return the table of payoffs where there is one, or of the games that members played while they became who they are."""
    if newest.payoffs:
        names = list(dict.fromkeys(one for one, _ in newest.payoffs))[:MEMBERS]
        most = max(map(abs, newest.payoffs.values())) or 1.0

        def paid(one: str, other: str) -> dict[str, Any] | None:
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
            "rows": [[paid(one, other) for other in names] for one in names],
        }
    games = {pair: counts for pair, counts in newest.results.items() if pair[0] != pair[1] and any(counts)}
    order = [*newest.members, *(name for pair in games for name in pair)]
    names = [name for name in dict.fromkeys(order) if any(name in pair for pair in games)][:MEMBERS]
    place = {name: k for k, name in enumerate(names)}
    counted: dict[tuple[int, int], list[int]] = {}
    for (one, other), counts in games.items():
        if one in place and other in place:
            first, second = sorted((place[one], place[other]))
            kept = counted.setdefault((first, second), [0, 0, 0])
            for k, count in enumerate(counts if first == place[one] else reversed(counts)):
                kept[k] += count
    entrants = [Entrant(name) for name in names]
    rows = [[result_cell(entrants, counted, k, n) for n in range(len(names))] for k in range(len(names))]
    return {"payoffs": False, "names": names, "rows": rows} if counted else None


def _draws(draws: Sequence[tuple[int, str, int]]) -> dict[str, Any] | None:
    """Return the share of tasks against each member over ranges of steps; tasks without one are the learner's against itself."""
    if not any(name for _, name, _ in draws):
        return None
    first, last = draws[0][0], draws[-1][0]
    width = -(-(last - first + 1) // COLUMNS)
    counts: dict[str, Counter[int]] = {}
    for step, name, tasks in draws:
        counts.setdefault(name or ITSELF, Counter())[(step - first) // width] += tasks
    total = Counter[int]()
    for own in counts.values():
        total.update(own)
    columns = sorted(total)
    met = sorted(counts, key=lambda name: -counts[name].total())[: MEMBERS - 1]
    others = Counter[int]()
    for name in set(counts) - set(met):
        others.update(counts[name])
    rows = {name: counts[name] for name in sorted(met, key=lambda name: (name != ITSELF, _by_entry(name)))}
    if others:
        rows[f"{len(counts) - len(met)} others"] = others
    spans = [(first + k * width, min(last, first + (k + 1) * width - 1)) for k in columns]
    return {
        "columns": [f"{start}–{end}" if end > start else str(start) for start, end in spans],
        "rows": [
            (
                name,
                [
                    _share(own[k] / total[k], f"{own[k]} of {total[k]} tasks", total[k]) if own[k] else None
                    for k in columns
                ],
            )
            for name, own in rows.items()
        ],
    }


def _strategies(entries: Sequence[EntryStanding]) -> list[dict[str, Any]]:
    """Return, for the latest entries, the chances that members are drawn; one table for all agents with the same ones."""
    latest = [entry for entry in entries if entry.strategy][-COLUMNS:]
    alike: dict[str, list[str]] = {}
    for agent in dict.fromkeys(agent for entry in latest for agent in entry.strategy):
        own = [sorted(entry.strategy.get(agent, {}).items()) for entry in latest]
        alike.setdefault(json.dumps(own), []).append(agent)
    tables = []
    for agents in list(alike.values())[:4]:
        chances = [entry.strategy.get(agents[0], {}) for entry in latest]
        names = list(dict.fromkeys(name for own in chances for name in own))
        names = sorted(names, key=lambda name: -sum(own.get(name, 0.0) for own in chances))[:MEMBERS]
        order = [name for own in chances for name in own]
        tables.append({
            "agents": agents if len(alike) > 1 else [],
            "columns": [entry.member for entry in latest],
            "rows": [
                (name, [_share(own[name], f"drawn with a chance of {own[name]:.3f}") if name in own else None for own in chances])
                for name in sorted(names, key=order.index)
            ],
        })  # fmt: skip
    return tables


def _share(value: float, words: str, of: int | None = None) -> dict[str, Any]:
    return {"share": value, "shade": shade(value), "words": words, "of": of}
