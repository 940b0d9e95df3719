"""The numbers of a run by name, step after step, as they are appended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from kapelle.viewer.lines import Tail, number

AXES = ("step", "time", "tokens")
"""What curves may be drawn over: steps, seconds of all steps so far, tokens sampled so far."""


_NOWHERE: deque[float | None] = deque(maxlen=0)
"""Where what has no column goes."""


@dataclass(slots=True)
class Table:
    """A run's `metrics.jsonl` in columns; a name that a step lacks is None there."""

    tail: Tail
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    axes: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in AXES})
    generation: int = 0
    """Grows when rows were taken back: a run that was resumed or rolled back."""

    disordered: int = 0
    """Rows whose step is not after that of the row before."""
    endless: int = 0
    """Numbers that are not finite."""
    _names: tuple[str, ...] = ()
    """Names of the last row, where each has a column."""
    _filled: list[MutableSequence[float | None]] = field(default_factory=list)
    _lacking: list[list[float | None]] = field(default_factory=list)
    _tokens: list[list[float | None]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.axes["step"])

    def refresh(self) -> None:
        """Read what was appended."""
        rows, anew = self.tail.read()
        if anew:
            self.columns.clear()
            self._names, self._tokens = (), []
            self.disordered = self.endless = 0
            for axis in self.axes.values():
                axis.clear()
            self.generation += 1
        for row in rows:
            self._take(row)

    def _take(self, row: Mapping[str, Any]) -> None:
        step, count = number(row.get("step")), len(self)
        if step is None:
            self.tail.damaged += 1
            return
        if tuple(row) == self._names:
            lacking = self._lacking
            for column, value in zip(self._filled, row.values(), strict=True):
                column.append(value if type(value) is float and isfinite(value) else self._number(value))
        else:
            for name, value in _plain(row):
                kept = self._number(value)
                if name != "step" and kept is not None:
                    self.columns.setdefault(name, [None] * count).append(kept)
            lacking = [column for column in self.columns.values() if len(column) <= count]
            self._remember(row)
        for column in lacking:
            column.append(None)
        self.disordered += bool(count) and step <= self.axes["step"][-1]
        self.axes["step"].append(step)
        tokens = sum(column[count] or 0.0 for column in self._tokens)
        for axis, more in (("time", _seconds(row)), ("tokens", tokens)):
            so_far = self.axes[axis][-1] if self.axes[axis] else 0.0
            self.axes[axis].append(so_far + more)

    def _number(self, value: object) -> float | None:
        found = number(value)
        self.endless += found is None and isinstance(value, float)
        return found

    def _remember(self, row: Mapping[str, Any]) -> None:
        """Keep which columns a row fills: the next rows mostly have the same names."""
        known = all(name == "step" or name in self.columns for name in row)
        self._names = tuple(row) if known else ()
        self._filled = [self.columns.get(name, _NOWHERE) for name in self._names]
        self._lacking = [column for name, column in self.columns.items() if name not in row]
        self._tokens = [column for name, column in self.columns.items() if name.startswith("tokens/")]

    def last(self) -> dict[str, float]:
        """Return the numbers of the last step."""
        return {
            name: column[-1] for name, column in self.columns.items() if column and column[-1] is not None
        }

    def rows_from(self, start: int) -> list[dict[str, Any]]:
        """Return the rows from this place on, each with its place on every axis."""
        return [
            {
                "at": {axis: places[k] for axis, places in self.axes.items()},
                "values": {name: column[k] for name, column in self.columns.items() if column[k] is not None},
            }
            for k in range(start, len(self))
        ]


def metrics_of(run: Path) -> Table:
    """Return the table of a run's metrics, nothing read yet."""
    return Table(Tail(run / "metrics.jsonl"))


def system_of(run: Path) -> Table:
    """Return the table of what the machine was doing; its time is that between rows."""
    return Table(Tail(run / "system.jsonl"))


def _seconds(row: Mapping[str, Any]) -> float:
    return number(row.get("time/step")) or number(row.get("seconds")) or 0.0


def _plain(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a row; those of several devices under a name for each."""
    for name, value in row.items():
        if isinstance(value, list):
            for k, inner in enumerate(value[:16]):
                if isinstance(inner, Mapping):
                    yield from ((f"{name} {key}/{k}", each) for key, each in inner.items())
        else:
            yield name, value


def stretches(steps: Sequence[float], width: int) -> list[tuple[int, int]]:
    """Return the rows of each stretch of `width` steps, as first and past the last: those of step 1 to `width`, and so on.

    So two runs are cut at the same steps, however long they are.
    """
    if width == 1:
        return [(k, k + 1) for k in range(len(steps))]
    numbers = [(step - 1) // width for step in steps]
    edges = [k for k in range(1, len(steps)) if numbers[k] != numbers[k - 1]]
    return list(pairwise([0, *edges, len(steps)])) if steps else []


def ends(places: Sequence[float], parts: Sequence[tuple[int, int]]) -> list[float]:
    """Return the place of each stretch: that of its last row."""
    return [places[end - 1] for _, end in parts]


def means(column: Sequence[float | None], parts: Sequence[tuple[int, int]]) -> list[float | None]:
    """Return the mean of each stretch; None where nothing is."""
    if len(parts) == len(column):
        return list(column)
    return [mean(column[start:end]) for start, end in parts]


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of what is there; None where nothing is."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
