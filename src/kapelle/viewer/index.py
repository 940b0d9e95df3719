"""The recorded episodes of a run in memory, for sorting, filters and search.

A thread reads new and changed steps, newest first; pages show the steps that have been read. The text of a step is
compressed.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zstandard

from kapelle.viewer.lines import Place, Stamp, lines_of, stamps
from kapelle.viewer.skimming import Skimmed, SkimmedPair, Tally, skimmed, spreads, tallies

SORTS = ("newest", "oldest", "most reward", "least reward", "greatest spread", "longest")
"""Orders of the table of episodes."""
OUTCOMES = ("right", "wrong", "errors", "scored")
FILTERS = ("q", "outcome", "task", "agent", "least", "most", "short", "long", "finish", "tag", "re")
"""Conditions other than a split and steps."""
LOOK_AGAIN = 1.0
"""Least seconds between two checks of a run's folders."""
WAIT = 0.5
"""Most seconds that a page waits for steps that are being read."""
_CUT = 200
"""Most characters of a text in a row; the compressed text of the step has all of it."""


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """An episode in the table of episodes."""

    split: str
    step: int
    line: int
    group: int
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

    @property
    def place(self) -> tuple[str, int, int]:
        """Split, step and line."""
        return self.split, self.step, self.line


@dataclass(frozen=True, slots=True)
class IndexedStep:
    """The episodes of one step."""

    stamp: Stamp
    rows: Sequence[EpisodeRow]
    text: bytes
    """The lower-case text of all episodes, separated by `\\0` and compressed."""
    met: Mapping[SkimmedPair, Tally]
    """Results of each pair of players."""


def indexed_step(run: Path, place: Place, stamp: Stamp) -> IndexedStep:
    """Read a step's episodes, without invalid lines."""
    raws = enumerate(lines_of(run, *place))
    found = [each for line, raw in raws if (each := skimmed(raw, line)) is not None]
    widest = spreads(found)
    text = "\0".join(each.words.replace("\0", " ").lower() for each in found)
    return IndexedStep(
        stamp,
        [_row(place, each, widest[each.group]) for each in found],
        zstandard.ZstdCompressor(1).compress(text.encode("utf-8", "replace")),
        tallies((each.part, each.players) for each in found),
    )


def _row(place: Place, each: Skimmed, spread: float) -> EpisodeRow:
    return EpisodeRow(
        *place,
        each.line,
        each.group,
        each.task,
        each.question[:_CUT],
        each.final[:_CUT],
        each.success,
        each.reward,
        each.rewards,
        spread,
        each.tokens,
        len(each.said),
        each.error[:_CUT],
        each.finishes,
        each.tags,
    )


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """How many of a run's recorded steps are in an index."""

    rows: int
    there: int

    @property
    def ready(self) -> bool:
        """Whether every step is."""
        return self.rows == self.there


class Index:
    """The episodes of one run that have been read; safe for several threads."""

    def __init__(self, run: Path, agents: Sequence[str]) -> None:
        self.run = run
        self.agents = list(agents)
        self._steps: dict[Place, IndexedStep] = {}
        self._there: Mapping[Place, Stamp] = {}
        self._looked = float("-inf")
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def refresh(self) -> IndexProgress:
        """Start to read new steps, wait briefly, and return the progress."""
        with self._lock:
            if self._look() and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._read, name="kapelle-index", daemon=True)
                self._thread.start()
            thread = self._thread
        if thread is not None:
            thread.join(WAIT)
        return self._progress()

    def finish(self) -> IndexProgress:
        """Read all steps in this thread."""
        self._looked = float("-inf")
        self._read()
        return self._progress()

    def _look(self) -> list[Place]:
        """Remove deleted steps and return new and changed ones, oldest first; the caller holds the lock."""
        now = time.monotonic()
        if now - self._looked >= LOOK_AGAIN:
            self._looked, self._there = now, stamps(self.run)
        there = self._there
        self._steps = {place: step for place, step in self._steps.items() if place in there}
        missing = (
            place
            for place, stamp in there.items()
            if place not in self._steps or self._steps[place].stamp != stamp
        )
        return sorted(missing, key=lambda place: place[1])

    def _read(self) -> None:
        with self._lock:
            missing, there = self._look(), self._there
        for place in reversed(missing):
            step = indexed_step(self.run, place, there[place])
            with self._lock:
                self._steps = {**self._steps, place: step}

    def _progress(self) -> IndexProgress:
        there, steps = self._there, self._steps
        done = sum(place in steps and steps[place].stamp == there[place] for place in there)
        return IndexProgress(done, len(there))

    def rows(self, query: Mapping[str, str], sort: str = "newest") -> list[EpisodeRow]:
        """Return the rows that a page's query selects, in one of `SORTS`. `selection.search` applies the expression `re`."""
        agent = query.get("agent", "") if query.get("agent") in self.agents else ""
        found = [
            row
            for step in self._chosen(query, oldest=sort == "oldest")
            for row in _with_words(step, re.findall(r"[^\W_]+", query.get("q", "").lower()))
            if _fits(row, query, agent)
        ]
        if sort in ("most reward", "least reward"):
            found.sort(key=lambda row: _or_least(reward_of(row, agent)), reverse=sort == "most reward")
        elif sort == "greatest spread":
            found.sort(key=lambda row: -row.spread)
        elif sort == "longest":
            found.sort(key=lambda row: -row.tokens)
        return found

    def _chosen(self, query: Mapping[str, str], *, oldest: bool) -> Iterator[IndexedStep]:
        split = "test" if query.get("split") == "test" else "train"
        first, last = (_number(query.get(name, "")) for name in ("from", "to"))
        steps = self._steps
        for place in sorted(steps, key=lambda place: place[1], reverse=not oldest):
            if place[0] == split and (first or 0) <= place[1] and (last is None or place[1] <= last):
                yield steps[place]

    def met(self) -> list[tuple[int, SkimmedPair, Tally]]:
        """Return the results of games in training and evaluation: step, two players, and their tally."""
        steps = sorted(self._steps.items(), key=lambda item: item[0][1])
        return [(place[1], pair, tally) for place, step in steps for pair, tally in step.met.items()]


def reward_of(row: EpisodeRow, agent: str) -> float | None:
    """Return an agent's reward, or without a name the mean of all agents."""
    return row.rewards.get(agent) if agent else row.reward


def _or_least(value: float | None) -> float:
    return -math.inf if value is None or math.isnan(value) else value


def _number(text: str) -> float | None:
    """Return the finite number in a text; None for any other text."""
    try:
        found = float(text.replace("−", "-"))
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _with_words(step: IndexedStep, words: Sequence[str]) -> Sequence[EpisodeRow]:
    """Return the rows of a step that contain all of these words, each as a whole word."""
    if not words or not step.rows:
        return step.rows
    text = zstandard.ZstdDecompressor().decompress(step.text).decode()
    if not all(word in text for word in words):
        return ()
    patterns = [re.compile(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])") for word in words]
    texts = zip(step.rows, text.split("\0"), strict=True)
    return [row for row, own in texts if all(pattern.search(own) for pattern in patterns)]


def _fits(row: EpisodeRow, query: Mapping[str, str], agent: str) -> bool:
    """Return whether an episode fits all conditions of a query except split, steps, words and expression."""
    outcome, reward = query.get("outcome"), reward_of(row, agent)
    if agent and reward is None:
        return False
    if outcome == "errors" and not row.error:
        return False
    if outcome in ("right", "wrong", "scored") and row.success is None:
        return False
    if row.success is not None and outcome == ("right" if row.success < 1 else "wrong"):
        return False
    for low, high, value in (("least", "most", reward), ("short", "long", row.tokens)):
        least, most = _number(query.get(low, "")), _number(query.get(high, ""))
        if (least is not None and (value is None or value < least)) or (
            most is not None and (value is None or value > most)
        ):
            return False
    return (
        query.get("task", "") in ("", row.task)
        and (not query.get("finish") or query["finish"] in row.finishes)
        and (not query.get("tag") or query["tag"] in row.tags)
    )
