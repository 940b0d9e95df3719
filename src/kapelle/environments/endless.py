"""Games that are played again and again: nothing but the seed tells one match from another."""

from __future__ import annotations

from kapelle.settings.base import Settings
from kapelle.types import Split, Task


class Endless(Settings):
    """Base of environments without problems of their own: a task is one match, and its text is empty."""

    def size(self, split: Split) -> int | None:
        """Return None: matches come without end."""
        return None

    def task(self, split: Split, index: int) -> Task:
        """Return one match."""
        return Task(f"{split}-{index}", "")
