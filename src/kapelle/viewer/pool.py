"""Shows the pool of a run's league: its members, their ratings, and their payoffs against each other.

When a member enters the pool, the run writes the state of the pool to `league/NAME/standing.json`. Damaged files do not
raise an error, and the page lists what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, FiniteFloat, StringConstraints, model_validator

from kapelle.runtime.files import plain_bytes
from kapelle.viewer.league import Entrant, add_result, in_order, result_cell, shade
from kapelle.viewer.library import ViewedRun

MEMBERS = 40
"""The maximum number of members in one table."""
ENTRIES = 300
"""The maximum number of entry files that are read. The most recently changed files are read."""
LARGEST, ALTOGETHER = 2_000_000, 20_000_000
"""The maximum number of bytes of one entry file, and of all entry files together."""
HIGHEST = 1e6
"""The largest valid rating, in points on the Elo scale."""
LEAGUE = "league/"
KINDS = {"past": "past self", "policy": "policy", "player": "player of the game"}


def _ordered(rating: tuple[float, float, float]) -> tuple[float, float, float]:
    middle, low, high = rating
    if not low <= middle <= high:
        raise ValueError("a rating outside its interval")
    return rating


Name = Annotated[str, StringConstraints(min_length=1, max_length=80)]
Rating = Annotated[float, Field(ge=-HIGHEST, le=HIGHEST)]
Chance = Annotated[float, Field(ge=-1e-9, le=1 + 1e-9)]
Whole = Annotated[int, Field(ge=0, lt=2**53)]


class PoolMember(BaseModel, strict=True):
    """A member of a league's pool."""

    name: Name
    kind: Literal["past", "policy", "player"]
    step: Whole | None = None
    """The step at which the member entered the pool."""


class PayoffTable(BaseModel, strict=True):
    """The payoff matrix: the mean return of the member in the row if all other players are the member in the column."""

    names: list[Name] = Field(min_length=1)
    table: list[list[FiniteFloat]]
    games: list[list[Whole | None]] | None = None
    """The number of games from which each payoff was estimated, or 0 if the payoff was computed exactly."""

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        for table in (self.table, self.games):
            if table is not None and [len(line) for line in table] != [len(self.names)] * len(self.names):
                raise ValueError("a table whose shape does not match")
        return self


class EntryStanding(BaseModel, strict=True):
    """The state of a pool when a member entered it."""

    step: Whole
    member: Name
    """The member that entered the pool."""
    members: list[PoolMember]
    ratings: dict[Name, Annotated[tuple[Rating, Rating, Rating], AfterValidator(_ordered)]]
    """The rating of each member, with the ends of its interval."""
    results: list[tuple[Name, Name, Whole, Whole, Whole]]
    """The results of games: the new member, the opponent, and the number of wins, draws and losses."""
    strategy: dict[Name, dict[Name, Chance]]
    """Mapping from an agent to the probability with which each member is sampled."""
    payoffs: PayoffTable | None = None


NO_ENTRY = EntryStanding.model_construct(step=0, member="", members=[], ratings={}, results=[], strategy={})


def read_entries(run: Path, last: float) -> tuple[list[EntryStanding], list[str]]:
    """Return the entries up to a step in order, and the names of the damaged entries.

    Files of later steps may remain after a rollback and are ignored.
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
            with suppress(OSError, ValueError):
                entry = EntryStanding.model_validate_json(plain_bytes(folder / "standing.json"))
        if entry is None:
            damaged.append(folder.name)
        elif entry.step <= last:
            found.append((entry.step, changed, entry))
    return [entry for *_, entry in sorted(found, key=lambda each: each[:2])], damaged


def pool(run: ViewedRun) -> dict[str, Any] | None:
    """Return the content that the page shows for the pool of a run, or None if the run has no league."""
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
    newest = entries[-1] if entries else NO_ENTRY
    # If no games link an exploiter to other members, the ratings of an earlier entry still apply.
    rated = next((entry for entry in reversed(entries) if entry.ratings), newest)
    missing = []
    if not entries:
        missing.append(
            "There is no standing.json, because no member has entered yet, so the pool is unknown."
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
    """Return a row for each member. Current members come first, ordered by rating, and former members follow."""
    about = {each.name: each for entry in entries for each in entry.members}
    current = dict.fromkeys(each.name for each in newest.members)
    former = {*about, *points} - {*current, ""}
    names = [*current, *sorted(former, key=in_order, reverse=True)]
    ends = [end for name, own in rated.ratings.items() if name in names for end in own]
    least, most = min(ends, default=0.0), max(ends, default=0.0)
    scale = 100 / ((most - least) or 1.0)
    rows: list[dict[str, Any]] = []
    for name in names:
        kind = KINDS[about[name].kind] if name in about else ""
        rating = rated.ratings.get(name)
        # Past versions of a learner enter the pool as `NAME@STEP`.
        learns = name.endswith(" on its way") or any(each.startswith(f"{name}@") for each in names)
        chances = [own.get(name, 0.0) for own in newest.strategy.values()]
        is_member = name in current
        rows.append({
            "name": name,
            "kind": "learner" if learns and not kind else kind,
            "entered": about[name].step if kind == KINDS["past"] else None,
            "always": kind in (KINDS["policy"], KINDS["player"]),
            "here": is_member,
            "left": bool(current) and not learns and not is_member,
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
    """Return the payoff matrix or, if there is none, the table of the games that members played before they entered the pool."""
    payoffs = newest.payoffs
    if payoffs is not None:
        names, most = (
            payoffs.names[:MEMBERS],
            max(abs(value) for line in payoffs.table for value in line) or 1.0,
        )
        counts = payoffs.games or [[None] * len(payoffs.names)] * len(payoffs.names)

        def payoff(row: int, column: int) -> dict[str, Any]:
            value, games = payoffs.table[row][column], counts[row][column]
            counted = "" if games is None else f", in {games:,} games" if games else ", computed exactly"
            words = f"{names[row]} has a mean return of {value:+.3f} if all other players are {names[column]}{counted}"
            return {"value": value, "shade": shade(value / most), "words": words, "games": games or None}

        return {
            "payoffs": True,
            "exact": any(0 in line for line in counts),
            "games": any(games for line in counts for games in line),
            "names": names,
            "rows": [[payoff(row, column) for column in range(len(names))] for row in range(len(names))],
        }
    games = {(one, other): own for one, other, *own in newest.results if one != other and any(own)}
    order = [*(each.name for each in newest.members), *(name for pair in games for name in pair)]
    names = [name for name in dict.fromkeys(order) if any(name in pair for pair in games)][:MEMBERS]
    place = {name: k for k, name in enumerate(names)}
    results: dict[tuple[int, int], list[int]] = {}
    for (one, other), own in games.items():
        if one in place and other in place:
            add_result(results, place[one], place[other], own)
    entrants = [Entrant(name) for name in names]
    rows = [[result_cell(entrants, results, k, n) for n in range(len(names))] for k in range(len(names))]
    return {"payoffs": False, "names": names, "rows": rows} if results else None
