"""The recorded episodes of a run in a temporary SQLite database, for filters, orders and searches.

A thread reads new and changed steps and searches their texts, newest first. Pages show what has been read, and how far the
thread is.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from kapelle.runs.step_rows import Stored
from kapelle.viewer.expression import Expression
from kapelle.viewer.lines import Place, recorded, stored_lines
from kapelle.viewer.skimming import Skimmed, SkimmedPair, Tally, skimmed, spreads, tallies

SORTS = {
    "newest": "",
    "oldest": "step, line,",
    "most reward": "{reward} DESC,",
    "least reward": "{reward},",
    "greatest spread": "spread DESC,",
    "longest": "tokens DESC,",
}
"""Orders of the table of episodes, in SQL; equal episodes follow one another newest first."""
OUTCOMES = {
    "right": "success >= 1",
    "wrong": "success < 1",
    "errors": "error != ''",
    "scored": "success IS NOT NULL",
}
FILTERS = ("q", "outcome", "task", "agent", "least", "most", "short", "long", "finish", "tag", "re")
"""Conditions other than a split and steps."""
LOOK_AGAIN = 1.0
"""Least seconds between two checks of a run's folders."""
WAIT = 0.5
"""Most seconds that a page waits for steps that are being read."""
SEARCHES = 8
"""Most searches whose results are kept: the newest ones."""
_CUT = 200
"""Most characters of a text in a row; the texts of the step have all of it."""


class EpisodeRow(NamedTuple):
    """An episode in the table of episodes."""

    split: str
    step: int
    line: int
    task: str
    question: str
    answer: str
    success: float | None
    reward: float | None
    """The agents' mean return."""
    rewards: Mapping[str, float]
    """Return of each agent."""
    spread: float
    """The difference between the largest and the smallest reward of its group."""
    tokens: int
    turns: int
    error: str
    finishes: Sequence[str]
    tags: Sequence[str]


_SCHEMA = f"""
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536;
CREATE TABLE episodes ({", ".join(EpisodeRow._fields)}, PRIMARY KEY (split, step, line)) WITHOUT ROWID;
CREATE TABLE texts (split, step, texts, PRIMARY KEY (split, step)) WITHOUT ROWID;
CREATE TABLE found (search, split, step, line, PRIMARY KEY (search, split, step, line)) WITHOUT ROWID;
"""
_JSON = tuple(EpisodeRow._fields.index(name) for name in ("rewards", "finishes", "tags"))


@dataclass(slots=True)
class Search:
    """The words and the regular expression of a query, whose episodes are in the table `found`."""

    number: int
    words: Sequence[re.Pattern[str]]
    expression: Expression | None
    agent: str
    """The agent whose turns the expression searches; empty for all texts."""
    looked: set[Place] = field(default_factory=set)
    """Steps whose texts were searched."""

    def finds(self, texts: Sequence[Any]) -> bool:
        """Return whether an episode has all the words, and a match of the expression."""
        _, others, turns = texts
        if self.words:
            whole = " ".join([*others, *(text for _, text in turns)]).lower()
            if not all(pattern.search(whole) for pattern in self.words):
                return False
        if self.expression is None:
            return True
        own = [text for name, text in turns if not self.agent or name == self.agent]
        return self.expression.finds(own if self.agent else [*others, *own])


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """How many of a run's recorded steps were read and searched."""

    rows: int
    there: int

    @property
    def ready(self) -> bool:
        """Whether every step was."""
        return self.rows == self.there


class Index:
    """The episodes of one run that have been read; safe for several threads."""

    def __init__(self, run: Path, agents: Sequence[str]) -> None:
        self.run = run
        self.agents = list(agents)
        # Without a name, the database is a temporary file that disappears with the connection.
        self._db = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._db.executescript(_SCHEMA)
        self._read: dict[Place, Stored] = {}
        self._met: dict[Place, Mapping[SkimmedPair, Tally]] = {}
        self._there: Mapping[Place, Stored] = {}
        self._searches: dict[tuple[str, str, str], Search] = {}
        self._searched = 0
        self._looked = float("-inf")
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def refresh(self, query: Mapping[str, str] | None = None) -> IndexProgress:
        """Start to read new steps and to search for a query, wait briefly, and return the progress."""
        search = self._search_of(query or {})
        with self._lock:
            self._look()
            if (self._thread is None or not self._thread.is_alive()) and self._left():
                self._thread = threading.Thread(target=self._work, name="kapelle-index", daemon=True)
                self._thread.start()
            thread = self._thread
        if thread is not None:
            thread.join(WAIT)
        return self._progress(search)

    def finish(self, query: Mapping[str, str] | None = None) -> None:
        """Read all steps and search for a query in this thread."""
        self._search_of(query or {})
        self._looked = float("-inf")
        self._work()

    def expression(self, query: Mapping[str, str]) -> Expression | None:
        """Return the expression of a query, which says why it cannot be used; None without an expression."""
        search = self._search_of(query)
        return None if search is None else search.expression

    def rows(
        self, query: Mapping[str, str], sort: str = "newest", start: int = 0, most: int = -1
    ) -> list[EpisodeRow]:
        """Return the rows that a page's query selects, in one of `SORTS`, from row `start` at most `most`."""
        fits, values, reward, reward_values = self._condition(query)
        order = SORTS[sort].format(reward=reward) + " step DESC, line"
        named = reward_values if "{reward}" in SORTS[sort] else ()
        statement = f"SELECT * FROM episodes WHERE {fits} ORDER BY {order} LIMIT ? OFFSET ?"
        with self._lock:
            found = self._db.execute(statement, (*values, *named, most, start)).fetchall()
        return [EpisodeRow(*(json.loads(v) if k in _JSON else v for k, v in enumerate(row))) for row in found]

    def count(self, query: Mapping[str, str]) -> int:
        """Return the number of rows that a page's query selects."""
        fits, values, *_ = self._condition(query)
        with self._lock:
            statement = f"SELECT count(*) FROM episodes WHERE {fits}"
            return int(self._db.execute(statement, values).fetchone()[0])

    def met(self) -> list[tuple[int, SkimmedPair, Tally]]:
        """Return the results of games in training and evaluation: step, two players, and their tally."""
        with self._lock:
            steps = sorted(self._met.items(), key=lambda item: item[0][1])
        return [(place[1], pair, tally) for place, met in steps for pair, tally in met.items()]

    # -------- The thread

    def _look(self) -> None:
        """Look for recorded steps, and remove those that are no longer there; the caller holds the lock."""
        now = time.monotonic()
        if now - self._looked >= LOOK_AGAIN:
            self._looked, self._there = now, recorded(self.run)
            for place in [place for place in self._read if place not in self._there]:
                self._forget(place)

    def _missing(self) -> list[Place]:
        """Return new and changed steps, newest first."""
        missing = (place for place, stored in self._there.items() if self._read.get(place) != stored)
        return sorted(missing, key=lambda place: place[1], reverse=True)

    def _left(self) -> bool:
        unsearched = any(self._read.keys() - search.looked for search in self._searches.values())
        return unsearched or bool(self._missing())

    def _work(self) -> None:
        """Read and search until nothing is left."""
        while True:
            with self._lock:
                self._look()
                missing, there = self._missing(), self._there
                if not self._left():
                    self._thread = None
                    return
            for place in missing:
                self._catch_up()
                self._take(place, there[place])
            self._catch_up()

    def _take(self, place: Place, stored: Stored) -> None:
        """Read a step's episodes, without invalid lines."""
        found = [
            each for line, raw in enumerate(stored_lines(stored)) if (each := skimmed(raw, line)) is not None
        ]
        widest = spreads(found)
        texts = json.dumps([_texts(each) for each in found]).encode()
        packed = zstandard.ZstdCompressor(1).compress(texts)
        with self._lock:
            self._db.execute("BEGIN")
            self._forget(place)
            marks = ", ".join("?" * len(EpisodeRow._fields))
            rows = [_row(place, each, widest[each.group]) for each in found]
            self._db.executemany(f"INSERT INTO episodes VALUES ({marks})", rows)
            self._db.execute("INSERT INTO texts VALUES (?, ?, ?)", (*place, packed))
            self._db.execute("COMMIT")
            self._read[place] = stored
            self._met[place] = tallies((each.part, each.players) for each in found)

    def _forget(self, place: Place) -> None:
        """Remove a step; the caller holds the lock."""
        self._db.execute("DELETE FROM episodes WHERE split = ? AND step = ?", place)
        self._db.execute("DELETE FROM texts WHERE split = ? AND step = ?", place)
        for search in self._searches.values():
            self._db.execute(
                "DELETE FROM found WHERE search = ? AND split = ? AND step = ?", (search.number, *place)
            )
            search.looked.discard(place)
        self._read.pop(place, None)
        self._met.pop(place, None)

    def _catch_up(self) -> None:
        """Search the texts of all steps that were read."""
        with self._lock:
            searches = list(self._searches.values())
        for search in searches:
            with self._lock:
                left = sorted(self._read.keys() - search.looked, key=lambda place: place[1], reverse=True)
            for place in left:
                with self._lock:
                    statement = "SELECT texts FROM texts WHERE split = ? AND step = ?"
                    (packed,) = self._db.execute(statement, place).fetchone()
                episodes = json.loads(zstandard.ZstdDecompressor().decompress(packed))
                fitting = [(search.number, *place, texts[0]) for texts in episodes if search.finds(texts)]
                with self._lock:
                    self._db.executemany("INSERT INTO found VALUES (?, ?, ?, ?)", fitting)
                    search.looked.add(place)

    def _progress(self, search: Search | None) -> IndexProgress:
        with self._lock:
            done = sum(self._read.get(place) == stored for place, stored in self._there.items())
            return IndexProgress(done if search is None else min(done, len(search.looked)), len(self._there))

    # -------- Conditions of a query, in SQL

    def _search_of(self, query: Mapping[str, str]) -> Search | None:
        """Return the search for the words and the expression of a query; None if it has neither."""
        words = re.findall(r"[^\W_]+", query.get("q", "").lower())
        agent = self._agent(query) if query.get("re") else ""
        key = " ".join(words), query.get("re", ""), agent
        if not words and not query.get("re"):
            return None
        with self._lock:
            search = self._searches.pop(key, None)
            if search is None:
                patterns = [re.compile(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])") for word in words]
                expression = Expression(query["re"]) if query.get("re") else None
                self._searched += 1
                search = Search(self._searched, patterns, expression, agent)
            self._searches[key] = search  # the newest is last
            for old in list(self._searches)[:-SEARCHES]:
                self._db.execute("DELETE FROM found WHERE search = ?", (self._searches.pop(old).number,))
        return search

    def _agent(self, query: Mapping[str, str]) -> str:
        return query["agent"] if query.get("agent") in self.agents else ""

    def _condition(self, query: Mapping[str, str]) -> tuple[str, list[object], str, list[object]]:
        """Return a query's condition in SQL with its values, and the reward of its agent, or of the team, with its values."""
        agent = self._agent(query)
        reward = "(SELECT value FROM json_each(rewards) WHERE key = ?)" if agent else "reward"
        own: list[object] = [agent] if agent else []
        conditions, values = (
            ["split = ?"],
            list[object](["test" if query.get("split") == "test" else "train"]),
        )

        def add(condition: str, *more: object) -> None:
            conditions.append(condition)
            values.extend(more)

        for name, bound in (
            ("from", "step >= ?"),
            ("to", "step <= ?"),
            ("short", "tokens >= ?"),
            ("long", "tokens <= ?"),
        ):
            if (limit := _number(query.get(name, ""))) is not None:
                add(bound, limit)
        for name, bound in (("least", f"{reward} >= ?"), ("most", f"{reward} <= ?")):
            if (limit := _number(query.get(name, ""))) is not None:
                add(bound, *own, limit)
        if agent:
            add(f"{reward} IS NOT NULL", *own)
        if query.get("outcome") in OUTCOMES:
            add(OUTCOMES[query["outcome"]])
        if query.get("task"):
            add("task = ?", _clean(query["task"]))
        for name, column in (("finish", "finishes"), ("tag", "tags")):
            if query.get(name):
                add(f"EXISTS (SELECT 1 FROM json_each({column}) WHERE value = ?)", _clean(query[name]))
        search = self._search_of(query)
        if search is not None:
            add(
                "(split, step, line) IN (SELECT split, step, line FROM found WHERE search = ?)", search.number
            )
        return " AND ".join(conditions), values, reward, own


def _texts(each: Skimmed) -> tuple[int, list[str], list[tuple[str, str]]]:
    """Return line, texts beside the turns, and agent and text of each turn."""
    turns = list(zip(each.speakers, each.said, strict=True))
    return each.line, [each.question, each.final, each.error], turns


def _row(place: Place, each: Skimmed, spread: float) -> tuple[object, ...]:
    texts = [_clean(text[:_CUT]) for text in (each.question, each.final, each.error)]
    rewards, finishes, tags = (json.dumps(value) for value in (each.rewards, each.finishes, each.tags))
    return (
        *place, each.line, _clean(each.task), texts[0], texts[1], each.success, each.reward, rewards, spread, each.tokens,
        len(each.said), texts[2], finishes, tags,
    )  # fmt: skip


def _clean(text: str) -> str:
    """Return a text without lone surrogates, which SQLite cannot store."""
    return text.encode("utf-8", "replace").decode()


def _number(text: str) -> float | None:
    """Return the finite number in a text; None for any other text."""
    try:
        found = float(text.replace("−", "-"))
    except ValueError:
        return None
    return found if math.isfinite(found) else None
