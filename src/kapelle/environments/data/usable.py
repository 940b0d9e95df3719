"""Rows that can be used, and those that cannot: counted, named, and left out up to a stated share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kapelle.errors import DataError

SHOWN = 3
"""Rows that are named; the others are counted."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Skipped:
    """The rows that were left out."""

    count: int = 0
    total: int = 0
    """All rows, those included."""
    named: tuple[str, ...] = ()
    """Where the first of them stand and why they cannot be used."""

    def __str__(self) -> str:
        """Return `3 of 7,473 rows cannot be used and are left out: …`, empty when there are none."""
        return f"{self._said()} and are left out: {self._why()}" if self.count else ""

    def _said(self) -> str:
        return f"{self.count:,} of {self.total:,} rows cannot be used"

    def _why(self) -> str:
        more = self.count - len(self.named)
        return " | ".join(self.named) + (f" | and {more:,} more" if more else "")

    def refused(self, where: str, share: float) -> DataError:
        """Return the error for more of them than may be left out."""
        return DataError(
            f"{where}: {self._said()}, more than `environment.max_unusable` = {share:.1%}: {self._why()}"
        )


@dataclass(frozen=True, slots=True)
class Usable(Generic[T]):
    """What is left."""

    rows: tuple[T, ...]
    skipped: Skipped


def usable(rows: Sequence[T], read: Callable[[T], object], share: float, where: str) -> Usable[T]:
    """Return the rows that `read` takes; DataError where it refuses more than `share` of them.

    `read` raises DataError, with the place of the row, for one that cannot be used.
    """
    kept: list[T] = []
    faults: list[str] = []
    count = 0
    for row in rows:
        try:
            read(row)
        except DataError as fault:
            count += 1
            if len(faults) < SHOWN:
                faults.append(str(fault))
        else:
            kept.append(row)
    skipped = Skipped(count, len(rows), tuple(faults))
    if count > share * len(rows):
        raise skipped.refused(where, share)
    return Usable(tuple(kept), skipped)
