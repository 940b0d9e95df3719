"""Evaluates regular expressions from users with limits on time and memory."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex

TEXT = 0.1
"""Maximum time in seconds that an expression may take on one episode."""
SLOW = 5
"""The number of timeouts after which an expression is no longer used."""
LONGEST = 200
"""The maximum number of characters of an expression."""
MOST_REPEATS = 10_000
"""The maximum number of copies of a part in nested repeats such as `(a{100}){100}`, because the compiler creates each copy."""


@dataclass(slots=True)
class Expression:
    """A regular expression from a user, with limits on time and memory."""

    source: str
    trouble: str = ""
    """The reason why the expression cannot be used; empty if the expression is valid."""
    slow: int = 0
    """The number of timeouts so far."""
    _pattern: Any = None

    def __post_init__(self) -> None:
        """Compile the expression, or set `trouble` if it is invalid."""
        copies = 1
        for low, high in re.findall(r"\{(\d*)(?:,(\d*))?\}", self.source):
            copies *= max(1, int((high or low or "1")[:9]))
        if len(self.source) > LONGEST:
            self.trouble = f"it has {len(self.source)} characters, but at most {LONGEST} are allowed"
        elif copies > MOST_REPEATS:
            self.trouble = f"its repeats create {copies:,} copies, but at most {MOST_REPEATS:,} are allowed"
        else:
            try:
                self._pattern = _compiled(self.source)
            except (regex.error, RecursionError, OverflowError, ValueError, MemoryError) as error:
                self.trouble = str(error) or type(error).__name__

    def finds(self, texts: Sequence[str]) -> bool:
        """Return whether the expression matches in one of an episode's texts. Returns False if the expression is no longer used."""
        if self._pattern is None or self.slow >= SLOW:
            return False
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
