"""The runs that a viewer shows: found under the folders that it was given, each read as it grows, with its numbers by name and step."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from kapelle.errors import KapelleError, RunDirectoryError
from kapelle.runs.reader import read_provenance, read_status, tag_hint
from kapelle.runs.summary import find_runs, settings_of
from kapelle.viewer.lines import Tail, number

# -------- The numbers of a run by name, step after step, as they are appended

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


LOOK_AGAIN = 5.0
"""Seconds after which folders are searched for new runs; more where the search takes long."""
STATES = {"running": "running", "finished": "finished", "interrupted": "stopped", "failed": "crashed"}
"""What a run's state is called on pages."""


@dataclass(slots=True)
class Run:
    """One run directory and what was read of it; use it under its lock."""

    key: str
    """Its name in addresses."""
    path: Path
    metrics: Table
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    system: Table = field(init=False)
    """What the machine was doing."""
    edition: int = 0
    """Grows with whatever is read of its metrics and evaluations."""
    drawn: Mapping[object, object] = field(default_factory=dict)
    """What was last worked out of them, by what it was worked out of."""
    _evaluated: Tail = field(init=False)
    _settings: tuple[float, dict[str, Any]] = (0.0, {})

    def __post_init__(self) -> None:
        self._evaluated = Tail(self.path / "evaluations.jsonl")
        self.system = system_of(self.path)

    def refresh(self) -> None:
        """Read what was appended to the run's tables."""
        before = len(self.metrics), self.metrics.generation
        self.metrics.refresh()
        rows, anew = self._evaluated.read()
        if anew:
            self.evaluations.clear()
        self.evaluations.extend(row for row in rows if isinstance(row.get("step"), int))
        if rows or anew or before != (len(self.metrics), self.metrics.generation):
            self.edition += 1

    def measured(self) -> dict[str, Any] | None:
        """Return the newest evaluation that has a success; None where there is none."""
        return next(
            (row for row in reversed(self.evaluations) if number(row.get("success")) is not None), None
        )

    @property
    def damaged(self) -> int:
        """Lines of the tables that could not be read."""
        return self.metrics.tail.damaged + self._evaluated.damaged

    def settings(self) -> Mapping[str, Any]:
        """Return the run's settings; nothing where they cannot be read."""
        try:
            changed = (self.path / "config.yaml").stat().st_mtime
            if changed != self._settings[0]:
                self._settings = changed, settings_of(self.path)
        except (KapelleError, OSError, ValueError, TypeError, RecursionError):
            return {}
        return self._settings[1]

    def origin(self) -> Mapping[str, Any]:
        """Return where each setting came from; nothing where that is not known."""
        try:
            return read_provenance(self.path)
        except KapelleError:
            return {}

    def status(self) -> dict[str, Any]:
        """Return what the run is doing, in words for a page."""
        try:
            found = read_status(self.path)
        except KapelleError as error:
            return {
                "state": "damaged",
                "phase": "",
                "step": 0,
                "started": "",
                "updated": "",
                "wrong": str(error),
            }
        return {
            "state": STATES[found.state],
            "phase": str(found.phase),
            "step": found.step,
            "started": str(found.started),
            "updated": str(found.updated),
            "wrong": "",
        }


class Library:
    """Finds runs and keeps what was read of them."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Show the runs at and under these folders; RunDirectoryError for one that is not there."""
        for root in roots:
            if not root.is_dir():
                raise RunDirectoryError(
                    f"There is no folder {root}.{tag_hint(root) or ' Name a run directory, or a folder that holds some.'}"
                )
        self.roots = tuple(root.resolve() for root in roots)
        self._runs: dict[str, Run] = {}
        self._looked, self._pause = 0.0, LOOK_AGAIN
        self._lock = threading.Lock()

    def runs(self) -> list[Run]:
        """Return all runs, those that were changed last first."""
        with self._lock:
            if not self._runs or time.monotonic() - self._looked > self._pause:
                self._look()
            return list(self._runs.values())

    def run(self, key: str) -> Run | None:
        """Return the run of a key; None where there is none."""
        self.runs()
        return self._runs.get(key)

    def _look(self) -> None:
        began = time.monotonic()
        found: dict[str, Run] = {}
        for root in self.roots:
            for path in find_runs(root):
                key = _free(_key(root, path), found)
                known = self._runs.get(key)
                found[key] = known if known and known.path == path else Run(key, path, metrics_of(path))
        self._runs = dict(sorted(found.items(), key=lambda item: _changed(item[1].path), reverse=True))
        self._looked = time.monotonic()
        self._pause = max(LOOK_AGAIN, 20 * (self._looked - began))


def _key(root: Path, path: Path) -> str:
    """Return a run's name in addresses: its way from the folder, or its own name where it is the folder."""
    way = path.relative_to(root).parts if path != root else (path.name or "run",)
    return "~".join(part.encode("utf-8", "replace").decode().replace("~", "~~") for part in way)


def _free(key: str, taken: Mapping[str, Run]) -> str:
    if key not in taken:
        return key
    return next(name for k in range(2, len(taken) + 3) if (name := f"{key}~{k}") not in taken)


def _changed(run: Path) -> float:
    try:
        return (run / "status.json").stat().st_mtime
    except OSError:
        return 0.0
