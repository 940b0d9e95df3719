"""The episodes of a run that a query selects, for the page of episodes and for `kapelle collect --recorded`.

A query is the part of the page's address after `?`: `split`, `from` and `to` (steps), `outcome`, `agent`, `task`, `q` (words),
`least` and `most` (reward, of `agent` if given), `short` and `long` (tokens), `finish`, `tag`, and `re`, a regular expression
over question, turns and answer (or over the turns of `agent` if given).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import regex

from kapelle.errors import ConfigError, did_you_mean
from kapelle.types import Split
from kapelle.viewer.index import FILTERS, OUTCOMES, EpisodeRow, Index
from kapelle.viewer.library import Library
from kapelle.viewer.lines import lines_of
from kapelle.viewer.skimming import Skimmed, skimmed

PAGE = 1.5
"""Seconds that a page spends on a regular expression; a link continues the search."""
TEXT = 0.1
"""Seconds that an expression may take on one episode."""
SLOW = 5
"""Number of timeouts after which an expression is stopped."""
LONGEST = 200
"""Most characters of an expression."""
MOST_REPEATS = 10_000
"""Most copies of a part in nested repeats like `(a{100}){100}`; the compiler makes each copy."""


@dataclass(slots=True)
class Expression:
    """A reader's regular expression, with limits on time and memory."""

    source: str
    trouble: str = ""
    """Why it cannot be used; empty if it can."""
    slow: int = 0
    """Number of timeouts."""
    _pattern: Any = None

    def __post_init__(self) -> None:
        """Compile it, or set `trouble`."""
        copies = 1
        for low, high in re.findall(r"\{(\d*)(?:,(\d*))?\}", self.source):
            copies *= max(1, int((high or low or "1")[:9]))
        if len(self.source) > LONGEST:
            self.trouble = f"it has {len(self.source)} characters, {LONGEST} are the most"
        elif copies > MOST_REPEATS:
            self.trouble = f"its repeats make {copies:,} copies, {MOST_REPEATS:,} are the most"
        else:
            try:
                self._pattern = _compiled(self.source)
            except (regex.error, RecursionError, OverflowError, ValueError, MemoryError) as error:
                self.trouble = str(error) or type(error).__name__

    def finds(self, each: Skimmed, agent: str) -> bool:
        """Return whether it matches in an episode: in an agent's turns, or without an agent in all texts."""
        if self._pattern is None or self.slow >= SLOW:
            return False
        if agent:
            texts = [text for name, text in zip(each.speakers, each.said, strict=True) if name == agent]
        else:
            texts = [each.question, *each.said, each.final, each.error]
        end = time.monotonic() + TEXT
        try:
            return any(
                self._pattern.search(text, timeout=max(0.001, end - time.monotonic()), concurrent=True)
                for text in texts
            )
        except TimeoutError:
            self.slow += 1
            if self.slow >= SLOW:
                self.trouble = f"it takes too long on {SLOW} episodes"
            return False


@lru_cache(maxsize=32)
def _compiled(source: str) -> Any:
    return regex.compile(source)


def search(
    run: Path, rows: Sequence[EpisodeRow], agent: str, expression: Expression
) -> Iterator[tuple[EpisodeRow, bool]]:
    """Yield rows, and whether the expression matches in each; stop if the expression becomes unusable.

    The lines of the last step are kept for the next row.
    """
    step: tuple[str, int] | None = None
    lines: list[bytes] = []
    for row in rows:
        if step != row.place[:2]:
            step = row.place[:2]
            lines = lines_of(run, *step)
        raw = lines[row.line] if row.line < len(lines) else b""
        each = skimmed(raw, row.line)
        yield row, each is not None and expression.finds(each, agent)
        if expression.trouble:
            return


def check_query(run: Path, text: str) -> None:
    """Raise ConfigError for an unknown filter or value in a query, which `Index.rows` would ignore."""
    known = Library([run]).runs()
    values = {
        "outcome": OUTCOMES,
        "split": ("train", "test"),
        "agent": tuple(known[0].agents()) if known else (),
    }
    for name, value in parse_qsl(text.removeprefix("?"), keep_blank_values=True):
        # Order and pages do not change the selection.
        if name not in (*FILTERS, "split", "from", "to", "sort", "page", "skip"):
            raise ConfigError(
                f"--recorded knows no filter '{name}'.{did_you_mean(name, (*FILTERS, 'split', 'from', 'to'))}"
            )
        if value and name in values and value not in values[name]:
            raise ConfigError(f"--recorded: `{name}` cannot be '{value}'.{did_you_mean(value, values[name])}")


def selected(run: Path, text: str) -> tuple[list[tuple[Split, int, int]], str]:
    """Return split, step and line of every selected episode, oldest first, and why the expression failed or stopped."""
    query = dict(parse_qsl(text.removeprefix("?"), keep_blank_values=False))
    known = Library([run]).runs()
    index = Index(run, known[0].agents() if known else [])
    index.finish()
    rows = index.rows(query, "oldest")
    expression = Expression(query["re"]) if query.get("re") else None
    if expression is None:
        return [_place(row) for row in rows], ""
    if expression.trouble:
        return [], expression.trouble
    agent = query.get("agent", "") if query.get("agent") in index.agents else ""
    found = [_place(row) for row, fits in search(run, rows, agent, expression) if fits]
    return found, expression.trouble


def _place(row: EpisodeRow) -> tuple[Split, int, int]:
    return "test" if row.split == "test" else "train", row.step, row.line
