"""Keeps the recorded episodes of a run in memory for filtering, sorting and searching.

A thread reads new and changed steps and searches their texts, starting with the newest step. Pages show the episodes
that have been read so far and the progress of the thread.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from kapelle.runs.step_rows import Stored
from kapelle.viewer.expression import Expression
from kapelle.viewer.lines import Place, recorded, stored_lines
from kapelle.viewer.skimming import Skimmed, SkimmedPair, Tally, skimmed, spreads, tallies

FILTERS = ("q", "outcome", "task", "agent", "least", "most", "short", "long", "finish", "tag", "re")
"""The names of the conditions in a query, except the split and the steps."""
LOOK_AGAIN = 1.0
"""Minimum time in seconds between two checks of a run's folders."""
WAIT = 0.5
"""Maximum time in seconds that a page waits for steps that are being read."""
SEARCHES = 8
"""The maximum number of searches whose results are kept. The most recent searches are kept."""
_CUT = 200
"""The maximum number of characters of a text in a row. The complete text is in the `texts` of the step."""


class EpisodeRow(NamedTuple):
    """An episode as a row in the table of episodes."""

    split: str
    step: int
    line: int
    task: str
    question: str
    answer: str
    success: float | None
    reward: float | None
    """The mean return of the agents."""
    rewards: Mapping[str, float]
    """The return of each agent."""
    spread: float
    """The difference between the largest and the smallest reward in the group of the episode."""
    tokens: int
    turns: int
    error: str
    finishes: Sequence[str]
    tags: Sequence[str]

    def reward_of(self, agent: str) -> float | None:
        """Return the reward of an agent, or of the team if the name is empty. Returns None if there is no reward."""
        return self.rewards.get(agent) if agent else self.reward


def _or_last(value: float | None, sign: int) -> float:
    return math.inf if value is None else sign * value


SORTS: Mapping[str, Callable[[EpisodeRow, str], float]] = {
    "newest": lambda row, _: -row.step,
    "oldest": lambda row, _: row.step,
    "most reward": lambda row, agent: _or_last(row.reward_of(agent), -1),
    "least reward": lambda row, agent: _or_last(row.reward_of(agent), 1),
    "greatest spread": lambda row, _: -row.spread,
    "longest": lambda row, _: -row.tokens,
}
"""Functions that return a sort key for a row and the chosen agent, by the name of the order. Episodes with equal keys are shown
newest first."""
OUTCOMES: Mapping[str, Callable[[EpisodeRow], bool]] = {
    "right": lambda row: row.success is not None and row.success >= 1,
    "wrong": lambda row: row.success is not None and row.success < 1,
    "errors": lambda row: row.error != "",
    "scored": lambda row: row.success is not None,
}


@dataclass(slots=True)
class Search:
    """The words and the regular expression of a query, and the episodes that match them."""

    words: Sequence[re.Pattern[str]]
    expression: Expression | None
    agent: str
    """The agent whose turns are searched with the expression. If empty, all texts are searched."""
    found: dict[Place, frozenset[int]] = field(default_factory=dict)
    """Mapping from a searched step to the line numbers of the matching episodes."""

    def finds(self, texts: Sequence[Any]) -> bool:
        """Return whether an episode contains all the words and matches the expression."""
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
    """The progress of reading and searching the recorded steps of a run."""

    rows: int
    there: int

    @property
    def ready(self) -> bool:
        """Whether every step has been read and searched."""
        return self.rows == self.there


@dataclass(frozen=True, slots=True)
class IndexedStep:
    """The episodes of one step."""

    stored: Stored
    rows: Sequence[EpisodeRow]
    texts: bytes
    """The texts of the episodes as compressed JSON."""
    met: Mapping[SkimmedPair, Tally]
    """The results of the games in the step."""


class Index:
    """The episodes of one run that have been read so far. This class is thread-safe."""

    def __init__(self, run: Path, agents: Sequence[str]) -> None:
        self.run = run
        self.agents = list(agents)
        self._read: dict[Place, IndexedStep] = {}
        self._there: Mapping[Place, Stored] = {}
        self._searches: dict[tuple[str, str, str], Search] = {}
        self._looked = float("-inf")
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def refresh(self, query: Mapping[str, str] | None = None) -> IndexProgress:
        """Start reading new steps and searching for a query, wait briefly, and return the progress."""
        search = self._search_of(query or {})
        with self._lock:
            self._look()
            if (self._thread is None or not self._thread.is_alive()) and self._left():
                self._thread = threading.Thread(target=self._work, name="kapelle-index", daemon=True)
                self._thread.start()
            thread = self._thread
        if thread is not None:
            thread.join(WAIT)
        with self._lock:
            done = len(self._there) - len(self._missing())
            return IndexProgress(done if search is None else min(done, len(search.found)), len(self._there))

    def finish(self, query: Mapping[str, str] | None = None) -> None:
        """Read all steps and search for a query in the current thread."""
        self._search_of(query or {})
        self._looked = float("-inf")
        self._work()

    def expression(self, query: Mapping[str, str]) -> Expression | None:
        """Return the regular expression of a query, or None if the query has none.

        If the expression cannot be used, the returned object contains the reason.
        """
        search = self._search_of(query)
        return None if search is None else search.expression

    def rows(self, query: Mapping[str, str], sort: str = "newest") -> list[EpisodeRow]:
        """Return the rows that the query of a page selects, in one of the orders in `SORTS`."""
        agent = query["agent"] if query.get("agent") in self.agents else ""
        split = "test" if query.get("split") == "test" else "train"
        outcome = OUTCOMES.get(query.get("outcome", ""))
        (first, last), (short, long), (least, most) = (
            (_number(query.get(low, ""), -math.inf), _number(query.get(high, ""), math.inf))
            for low, high in (("from", "to"), ("short", "long"), ("least", "most"))
        )
        needs_reward = bool(agent) or least > -math.inf or most < math.inf
        task, finish, tag = (_clean(query.get(name, "")) for name in ("task", "finish", "tag"))
        search = self._search_of(query)

        def fits(row: EpisodeRow) -> bool:
            reward = row.reward_of(agent)
            return (
                short <= row.tokens <= long
                and (not needs_reward or (reward is not None and least <= reward <= most))
                and (outcome is None or outcome(row))
                and (not task or row.task == task)
                and (not finish or finish in row.finishes)
                and (not tag or tag in row.tags)
            )

        with self._lock:
            places = sorted((place for place in self._read if place[0] == split), reverse=True)
            found = [
                row
                for place in places
                if first <= place[1] <= last
                for row in self._read[place].rows
                if (search is None or row.line in search.found.get(place, ())) and fits(row)
            ]
        return sorted(found, key=lambda row: SORTS[sort](row, agent))

    def met(self) -> list[tuple[int, SkimmedPair, Tally]]:
        """Return the results of games in training and evaluation. Each item contains the step, the two players and their results."""
        with self._lock:
            steps = sorted(self._read.items(), key=lambda item: item[0][1])
        return [(place[1], pair, tally) for place, step in steps for pair, tally in step.met.items()]

    # -------- The thread

    def _look(self) -> None:
        """Look for recorded steps, and remove steps that no longer exist. The caller must hold the lock."""
        now = time.monotonic()
        if now - self._looked >= LOOK_AGAIN:
            self._looked, self._there = now, recorded(self.run)
            for place in self._read.keys() - self._there.keys():
                self._forget(place)

    def _missing(self) -> list[Place]:
        """Return the steps that are new or have changed, newest first."""
        missing = (
            place
            for place, stored in self._there.items()
            if place not in self._read or self._read[place].stored != stored
        )
        return sorted(missing, key=lambda place: place[1], reverse=True)

    def _left(self) -> bool:
        unsearched = any(self._read.keys() - search.found.keys() for search in self._searches.values())
        return unsearched or bool(self._missing())

    def _work(self) -> None:
        """Read and search steps until there are none left."""
        while True:
            with self._lock:
                self._look()
                missing, there = self._missing(), self._there
                if not self._left():
                    self._thread = None
                    return
            for place in missing:
                self._catch_up()
                step = _indexed(place, there[place])
                with self._lock:
                    self._forget(place)
                    self._read[place] = step
            self._catch_up()

    def _forget(self, place: Place) -> None:
        """Remove a step from the index. The caller must hold the lock."""
        self._read.pop(place, None)
        for search in self._searches.values():
            search.found.pop(place, None)

    def _catch_up(self) -> None:
        """Search the texts of all steps that have been read."""
        with self._lock:
            searches = list(self._searches.values())
        for search in searches:
            with self._lock:
                left = [(place, step) for place, step in self._read.items() if place not in search.found]
            for place, step in sorted(left, key=lambda each: each[0][1], reverse=True):
                episodes = json.loads(zstandard.ZstdDecompressor().decompress(step.texts))
                fitting = frozenset(texts[0] for texts in episodes if search.finds(texts))
                with self._lock:
                    if self._read.get(place) is step:
                        search.found[place] = fitting

    def _search_of(self, query: Mapping[str, str]) -> Search | None:
        """Return the search for the words and the expression of a query, or None if the query has neither."""
        words = re.findall(r"[^\W_]+", query.get("q", "").lower())
        source = query.get("re", "")
        agent = query["agent"] if source and query.get("agent") in self.agents else ""
        if not words and not source:
            return None
        key = " ".join(words), source, agent
        with self._lock:
            search = self._searches.pop(key, None)
            if search is None:
                patterns = [re.compile(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])") for word in words]
                search = Search(patterns, Expression(source) if source else None, agent)
            self._searches[key] = search  # the newest search is last
            for old in list(self._searches)[:-SEARCHES]:
                del self._searches[old]
        return search


def _indexed(place: Place, stored: Stored) -> IndexedStep:
    """Read the episodes of a step, except invalid lines."""
    lines = enumerate(stored_lines(stored))
    found = [each for line, raw in lines if (each := skimmed(raw, line)) is not None]
    widest = spreads(found)
    texts = json.dumps([_texts(each) for each in found]).encode()
    return IndexedStep(
        stored,
        [_row(place, each, widest[each.group]) for each in found],
        zstandard.ZstdCompressor(1).compress(texts),
        tallies((each.part, each.players) for each in found),
    )


def _texts(each: Skimmed) -> tuple[int, list[str], list[tuple[str, str]]]:
    """Return the line number of an episode, the texts that do not belong to a turn, and the agent and text of each turn."""
    turns = list(zip(each.speakers, each.texts, strict=True))
    return each.line, [each.question, each.final, each.error], turns


def _row(place: Place, each: Skimmed, spread: float) -> EpisodeRow:
    question, answer, error = (_clean(text[:_CUT]) for text in (each.question, each.final, each.error))
    return EpisodeRow(
        *place, each.line, _clean(each.task), question, answer, each.success, each.reward, each.rewards, spread, each.tokens,
        len(each.texts), error, each.finishes, each.tags,
    )  # fmt: skip


def _clean(text: str) -> str:
    """Return a string without lone surrogates, which a URL cannot contain."""
    return text.encode("utf-8", "replace").decode()


def _number(text: str, default: float) -> float:
    """Parse a string as a finite number. Returns `default` for any other string."""
    try:
        found = float(text.replace("−", "-"))
    except ValueError:
        return default
    return found if math.isfinite(found) else default
