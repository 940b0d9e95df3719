"""The SQLite tables of an index of episodes; they are filled newest steps first, and answer queries meanwhile."""

from __future__ import annotations

import math
import os
import re
import sqlite3
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from kapelle.viewer.lines import Place, Stamp, changes, stamps
from kapelle.viewer.skimming import Skimmed, SkimmedPair, Tally, spreads, tallies

FORM = 8
"""Version of the tables; an index of another version is made anew."""
SEATS = 8
"""Agents whose rewards have columns of their own."""
WINDOW = 20_000
"""How many of the newest episodes orders and conditions apply to, until all rows are there and sorted."""
COUNTED = 1_000
"""Most rows that are counted under a condition; beyond them a page says that there are more."""
HITS = 20_000
"""Most hits of a search that are gathered and then sorted; with more hits, rows are tested in the order of the page."""
SORTS = {
    "newest": "step DESC, line",
    "oldest": "step, line",
    "most reward": "{reward} DESC, step DESC",
    "least reward": "{reward}, step DESC",
    "greatest spread": "spread DESC, step DESC, line",
    "longest": "tokens DESC, step DESC",
}
"""Orders of the table of episodes: words on the page → SQL."""
OUTCOMES = {
    "right": "success >= 1",
    "wrong": "success < 1",
    "errors": "error <> ''",
    "scored": "success IS NOT NULL",
}
_RARE = "(SELECT rowid AS hit FROM words WHERE words MATCH ? LIMIT {most}) CROSS JOIN episodes ON id = hit"
"""Starts from the hits, those first that were indexed first; SQLite keeps the order of a cross join."""
_OFTEN = "EXISTS (SELECT 1 FROM words WHERE words MATCH ? AND words.rowid = episodes.id)"
_TABLES = """
CREATE TABLE IF NOT EXISTS files (split TEXT, step INTEGER, size INTEGER, changed INTEGER, episodes INTEGER, PRIMARY KEY (split, step));
CREATE TABLE IF NOT EXISTS episodes (
  id INTEGER PRIMARY KEY AUTOINCREMENT, split TEXT, step INTEGER, line INTEGER, team INTEGER, task TEXT, question TEXT, said TEXT,
  success REAL, reward REAL, spread REAL, tokens INTEGER, turns INTEGER, error TEXT, finish TEXT, tags TEXT,
  a0 REAL, a1 REAL, a2 REAL, a3 REAL, a4 REAL, a5 REAL, a6 REAL, a7 REAL);
CREATE INDEX IF NOT EXISTS by_step ON episodes (split, step, line, success);
CREATE TABLE IF NOT EXISTS meetings (
  split TEXT, step INTEGER, part TEXT, one TEXT, one_version INTEGER, other TEXT, other_version INTEGER,
  wins INTEGER, draws INTEGER, losses INTEGER, unlike INTEGER);
CREATE INDEX IF NOT EXISTS met_at ON meetings (split, step);
CREATE TABLE IF NOT EXISTS draws (split TEXT, step INTEGER, member TEXT, tasks INTEGER);
CREATE INDEX IF NOT EXISTS drawn_at ON draws (split, step);
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (said, content='', detail=none);
"""
_ORDERS = (
    "by_most ON episodes (split, reward DESC, step DESC, success)",
    "by_least ON episodes (split, reward, step DESC, success)",
    "by_spread ON episodes (split, spread DESC, step DESC, line, success)",
    "by_tokens ON episodes (split, tokens DESC, step DESC, success)",
    "by_task ON episodes (task, split, step)",
    "by_error ON episodes (split, step) WHERE error <> ''",
)
"""Made once all rows are there, which is many times faster than keeping them sorted while rows are added. Each contains
`success`, so that a condition on it is decided in the index, without reading the row."""
_SEAT_ORDERS = (
    "most_a{k} ON episodes (split, a{k} DESC, step DESC, success)",
    "least_a{k} ON episodes (split, a{k}, step DESC, success)",
)
_SORTED = "sorted"
"""Name of a table that exists once all orders do."""


@dataclass(frozen=True, slots=True)
class Query:
    """A condition on episodes: SQL made by this module with its values, and words that must all occur."""

    where: str
    values: list[Any]
    words: str = ""
    plain: bool = False
    """Whether it names only a split and steps."""
    rare: bool = False
    """Whether it names a task or errors, which have an index of their own."""
    split: str = "train"


class Tables:
    """One file of tables: one connection writes under a lock, another one reads meanwhile."""

    def __init__(self, where: str, agents: Sequence[str]) -> None:
        """Open or make the file; raises `sqlite3.Error` if that is impossible."""
        self.agents = list(agents)[:SEATS]
        self.file = None if where == ":memory:" else Path(where)
        """None for tables in memory."""
        self.writing = threading.Lock()
        self._base = self._reader = self._connect(where, 60.0)
        for pragma in (
            "journal_mode = WAL",
            "synchronous = OFF",
            "cache_size = -65536",
            "temp_store = MEMORY",
        ):
            self._base.execute(f"PRAGMA {pragma}")
        self._base.executescript(_TABLES)
        if self.file is not None and not os.access(self.file, os.W_OK):
            raise sqlite3.OperationalError(f"{self.file} cannot be written")
        if self.file is not None:
            self._reader = self._connect(where, 5.0)
        self._reading = self.writing if self.file is None else threading.Lock()
        self._sorted = False

    def _connect(self, where: str, timeout: float) -> sqlite3.Connection:
        base = sqlite3.connect(where, check_same_thread=False, timeout=timeout)
        # From Python 3.13 on, a connection that is only forgotten causes a warning; at exit a thread may still write.
        weakref.finalize(self, base.close).atexit = False
        return base

    def known(self) -> dict[Place, Stamp]:
        """Return the indexed steps, with their stamps when they were indexed."""
        with self._reading:
            rows = self._reader.execute("SELECT split, step, size, changed FROM files").fetchall()
        return {(split, step): (size, changed) for split, step, size, changed in rows}

    @property
    def sorted(self) -> bool:
        """Whether all orders exist."""
        if not self._sorted:
            asked = "SELECT 1 FROM sqlite_master WHERE name = ?"
            with self._reading:
                self._sorted = self._reader.execute(asked, (_SORTED,)).fetchone() is not None
        return self._sorted

    def put(self, steps: Mapping[Place, tuple[Stamp, Sequence[Skimmed]]]) -> None:
        """Write the rows and words of some steps in place of their old ones."""
        marks = ", ".join("?" * (16 + SEATS))
        with self.writing:
            self._base.execute("BEGIN IMMEDIATE")  # another viewer may index the same run
            for place, (stamp, found) in steps.items():
                asked = "SELECT size, changed FROM files WHERE split = ? AND step = ?"
                if self._base.execute(asked, place).fetchone() == stamp:
                    continue
                self._forget(place)
                widest = spreads(found)
                # Numbers above those of all rows and words so far.
                last = self._base.execute(
                    "SELECT seq FROM sqlite_sequence WHERE name = 'episodes'"
                ).fetchone()
                first = (last[0] if last else 0) + 1
                self._base.executemany(
                    f"INSERT INTO episodes VALUES ({marks})",
                    [
                        (first + k, *row_of(place, each, widest[each.group], self.agents).values())
                        for k, each in enumerate(found)
                    ],
                )
                self._base.executemany(
                    "INSERT INTO words (rowid, said) VALUES (?, ?)",
                    [(first + k, storable(each.words)) for k, each in enumerate(found)],
                )
                met = tallies((each.part, each.players) for each in found)
                self._base.executemany(
                    "INSERT INTO meetings VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    [
                        (
                            *place,
                            *(
                                storable(each[:80]) if isinstance(each, str) else each
                                for each in astuple(pair)
                            ),
                            *astuple(tally),
                        )
                        for pair, tally in met.items()
                    ],
                )
                drawn = Counter({each.group: storable(each.met[:80]) for each in found}.values())
                self._base.executemany(
                    "INSERT INTO draws VALUES (?, ?, ?, ?)", [(*place, *each) for each in drawn.items()]
                )
                self._base.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?)", (*place, *stamp, len(found)))
            self._base.commit()

    def forget(self, places: Sequence[Place]) -> None:
        """Remove the rows of steps that are gone."""
        with self.writing:
            for place in places:
                self._forget(place)
            self._base.commit()

    def _forget(self, place: Place) -> None:
        # A contentless table keeps its words. They point to rows that are gone, whose numbers are never given again.
        self._base.execute("DELETE FROM episodes WHERE split = ? AND step = ?", place)
        self._base.execute("DELETE FROM meetings WHERE split = ? AND step = ?", place)
        self._base.execute("DELETE FROM draws WHERE split = ? AND step = ?", place)
        self._base.execute("DELETE FROM files WHERE split = ? AND step = ?", place)

    def sort(self) -> None:
        """Make the indexes of all orders, unless they exist."""
        if self.sorted:
            return
        seats = [order.format(k=k) for k in range(len(self.agents)) for order in _SEAT_ORDERS]
        for order in (*_ORDERS, *seats):
            with self.writing:
                self._base.execute(f"CREATE INDEX IF NOT EXISTS {order}")
                self._base.commit()
        with self.writing:
            self._base.execute(f"CREATE TABLE IF NOT EXISTS {_SORTED} (yes)")
            self._base.commit()

    def find(self, query: Query, sort: str, agent: str, start: int, count: int) -> list[dict[str, Any]]:
        """Return rows of the table of episodes."""
        reward = f"a{self.agents.index(agent)}" if agent in self.agents else "reward"
        order = SORTS[sort].format(reward=reward)
        query = self._in_reach(query, sort)
        with self._reading:
            chosen, values, _ = self._chosen(query)
            cursor = self._reader.execute(
                f"SELECT episodes.* FROM {chosen} ORDER BY {order} LIMIT ? OFFSET ?", [*values, count, start]
            )
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def count(self, query: Query, most: int = COUNTED) -> int | None:
        """Return how many episodes fit, counting to `most` under a condition; None if the words have too many hits."""
        query = self._in_reach(query)
        with self._reading:
            if query.plain:
                asked = f"SELECT SUM(episodes) FROM files WHERE {query.where}"
                return int(self._reader.execute(asked, query.values).fetchone()[0] or 0)
            # In an index that is ordered by success, all rows that fit could come after those that do not.
            chosen, values, often = self._chosen(query, "" if query.rare else "INDEXED BY by_step")
            if often:
                return None
            asked = f"SELECT COUNT(*) FROM (SELECT 1 FROM {chosen} LIMIT ?)"
            return int(self._reader.execute(asked, [*values, most]).fetchone()[0])

    def _in_reach(self, query: Query, sort: str = "newest") -> Query:
        """Return a query that is answered fast: until the orders exist, one of the newest indexed episodes."""
        if self.sorted or query.words or (query.plain and sort in ("newest", "oldest")):
            return query
        newest = "SELECT step, episodes FROM files WHERE split = ? ORDER BY step DESC"
        total, first = 0, 0
        with self._reading:
            for step, episodes in self._reader.execute(newest, (query.split,)):
                total += episodes
                if total > WINDOW and first:
                    break
                first = step
        return replace(query, where=f"{query.where} AND step >= ?", values=[*query.values, first])

    def _chosen(self, query: Query, by: str = "") -> tuple[str, list[Any], bool]:
        """Return the SQL after FROM with its values, and whether the words have too many hits to be gathered."""
        if not query.words:
            return f"episodes {by} WHERE {query.where}", query.values, False
        hits = "SELECT COUNT(*) FROM (SELECT 1 FROM words WHERE words MATCH ? LIMIT ?)"
        often = self._reader.execute(hits, [query.words, HITS + 1]).fetchone()[0] > HITS
        if often and self._sorted:
            return f"episodes WHERE {query.where} AND {_OFTEN}", [*query.values, query.words], True
        return f"{_RARE.format(most=HITS)} WHERE {query.where}", [query.words, *query.values], often

    def met(self) -> list[tuple[int, SkimmedPair, Tally]]:
        """Return who met whom in training and evaluation: the step, the two players, and their results."""
        with self._reading:
            rows = self._reader.execute("SELECT * FROM meetings ORDER BY step").fetchall()
        return [(row[1], SkimmedPair(*row[2:7]), Tally(*row[7:])) for row in rows]

    def drawn(self) -> list[tuple[int, str, int]]:
        """Return whom a league has drawn: a training step, a member, and how many tasks; without a name those without one."""
        asked = "SELECT step, member, tasks FROM draws WHERE split = 'train' ORDER BY step"
        with self._reading:
            return self._reader.execute(asked).fetchall()

    def close(self) -> None:
        """Close the file once current reads and writes are done."""
        with self.writing:
            self._base.close()
        with self._reading:
            self._reader.close()


def row_of(place: Place, each: Skimmed, spread: float, agents: Sequence[str]) -> dict[str, Any]:
    """Return an episode's row in the table, by column."""
    split, step = place
    seats = {f"a{k}": each.rewards.get(agents[k]) if k < len(agents) else None for k in range(SEATS)}
    return {
        "split": split, "step": step, "line": each.line, "team": each.group, "task": storable(each.task),
        "question": storable(each.question[:200]), "said": storable(each.final[:200]), "success": each.success,
        "reward": each.reward, "spread": spread, "tokens": each.tokens, "turns": len(each.said),
        "error": storable(each.error[:200]), "finish": _listed(each.finishes), "tags": _listed(each.tags), **seats,
    }  # fmt: skip


def _listed(words: Sequence[str]) -> str:
    """Return words between line ends, so that each can be found as a whole."""
    return "".join(f"\n{storable(word.replace(chr(10), ' '))}" for word in words) + "\n" if words else ""


FILTERS = ("q", "outcome", "task", "agent", "least", "most", "short", "long", "finish", "tag", "re")
"""Conditions other than a split and steps."""
_MEASURES = (
    ("least", "{reward} >= ?"),
    ("most", "{reward} <= ?"),
    ("short", "tokens >= ?"),
    ("long", "tokens <= ?"),
)
_LISTS = (("finish", "finish"), ("tag", "tags"))


def _decimal(text: str) -> float | None:
    """Return the finite number that a text is; None for anything else."""
    try:
        found = float(text.replace("−", "-"))
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def asked(query: Mapping[str, str], agents: Sequence[str] = ()) -> Query:
    """Return the condition that a page's query describes."""
    parts = ["split = ?"]
    values: list[Any] = [query.get("split") if query.get("split") in ("train", "test") else "train"]
    for name, sign in (("from", ">="), ("to", "<=")):
        if query.get(name, "").isdecimal() and len(query[name]) < 12:
            parts.append(f"step {sign} ?")
            values.append(int(query[name]))
    plain = len(parts)
    if query.get("outcome") in OUTCOMES:
        parts.append(OUTCOMES[query["outcome"]])
    if query.get("agent") in agents[:SEATS]:
        parts.append(f"a{agents.index(query['agent'])} IS NOT NULL")
    if query.get("task"):
        parts.append("task = ?")
        values.append(storable(query["task"]))
    seat = agents.index(query["agent"]) if query.get("agent") in agents[:SEATS] else None
    for name, condition in _MEASURES:
        if (least := _decimal(query.get(name, ""))) is not None:
            parts.append(condition.format(reward="reward" if seat is None else f"a{seat}"))
            values.append(least)
    for name, column in _LISTS:
        if query.get(name):
            parts.append(f"instr({column}, ?) > 0")
            values.append(_listed([query[name]]))
    words = " AND ".join(f'"{word}"' for word in re.findall(r"[^\W_]+", query.get("q", "")))
    rare = bool(query.get("task")) or query.get("outcome") == "errors"
    return Query(" AND ".join(parts), values, words, len(parts) == plain and not words, rare, values[0])


def elsewhere(task: str, split: str, step: int, line: int) -> Query:
    """Return a condition for the other episodes of a task."""
    where = "task = ? AND NOT (split = ? AND step = ? AND line = ?)"
    return Query(where, [storable(task), split, step, line], rare=True, split=split)


def storable(text: str) -> str:
    """Return a text that SQLite can store."""
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    return text.replace("\0", " ")


# -------- Which steps of a run are recorded, and which of them an index has

LOOK_AGAIN = 1.0
"""Seconds between two looks at a run's folders."""
LOOK_ANYWAY = 15.0
"""Seconds after which all files are looked at, even if the folders are unchanged."""


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """How many of a run's steps an index has."""

    rows: int
    there: int
    sorted: bool = True
    """Whether orders and conditions apply to all of them."""
    trouble: str = ""
    """Why indexing has stopped, in words; empty if it has not."""

    @property
    def whole(self) -> bool:
        """Whether every step is in the index."""
        return self.rows == self.there

    @property
    def ready(self) -> bool:
        """Whether nothing is left to do."""
        return self.whole and self.sorted


class StepSurvey:
    """Compares the steps of a run with those of its index; it may be called from several threads."""

    def __init__(self, run: Path, known: Mapping[Place, Stamp]) -> None:
        self.run = run
        self._state = threading.Lock()
        self._known = dict(known)
        self.there: Mapping[Place, Stamp] = {}
        """The steps that are recorded, as they were when last looked at."""
        self._missing: list[Place] = []
        """Newest last."""
        self._bytes = self._rows = 0
        self.gone: list[Place] = []
        """Steps of the index that the run no longer has."""
        self._looked = self._listed = float("-inf")
        self._folders: object = None

    def look(self, *, again: bool = False) -> None:
        """List the run's steps, unless they were listed a moment ago."""
        now = time.monotonic()
        if not again and now - self._looked < LOOK_AGAIN:
            return
        self._looked = now
        folders = changes(self.run)
        if not again and folders == self._folders and now - self._listed < LOOK_ANYWAY:
            return
        self._folders, self._listed = folders, now
        there = stamps(self.run)
        with self._state:
            self.there = there
            self._compare()

    def relearn(self, known: Mapping[Place, Stamp]) -> None:
        """Take over what the index has now, which another process writes."""
        with self._state:
            self._known = dict(known)
            self._compare()

    def learn(self, written: Mapping[Place, Stamp]) -> None:
        """Note what was written into the index."""
        with self._state:
            self._known |= written
            self._rows += sum(self.there.get(place) == stamp for place, stamp in written.items())

    def forget(self, places: Iterable[Place]) -> None:
        """Note what was taken out of the index."""
        with self._state:
            for place in places:
                self._known.pop(place, None)
            self.gone = [place for place in self.gone if place in self._known]

    def take(self) -> tuple[Place, Stamp] | None:
        """Return the newest step that the index lacks and nobody has taken yet; None without one."""
        with self._state:
            if not self._missing:
                return None
            place = self._missing.pop()
            self._bytes -= self.there[place][0]
            return place, self.there[place]

    @property
    def lacking(self) -> bool:
        """Whether the index differs from the run."""
        return bool(self.gone or self._missing)

    @property
    def left(self) -> tuple[int, int]:
        """How many steps the index lacks, and their bytes as they are stored."""
        with self._state:
            return len(self._missing), self._bytes

    def progress(self, ordered: bool, trouble: str = "") -> IndexProgress:
        """Return how far the index is."""
        with self._state:
            return IndexProgress(self._rows, len(self.there), ordered, trouble)

    def _compare(self) -> None:
        self.gone = [place for place in self._known if place not in self.there]
        self._missing = sorted(
            (place for place, stamp in self.there.items() if self._known.get(place) != stamp),
            key=lambda place: place[1],
        )
        self._rows = len(self.there) - len(self._missing)
        self._bytes = sum(self.there[place][0] for place in self._missing)
