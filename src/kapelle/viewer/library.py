"""The runs that a viewer shows: found under its folders and read as they grow, with their numbers by name and step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from kapelle.errors import KapelleError, RunDirectoryError
from kapelle.functional.distributions import Histogram, read_histogram
from kapelle.runs.reader import read_provenance, read_status, tag_hint
from kapelle.runs.summary import find_runs, settings_of
from kapelle.runs.verdict import Verdict
from kapelle.viewer.lines import Tail, mapping, mean, number, whole

# -------- The numbers of a run by name, step after step, as they are appended

AXES = ("step", "time", "tokens")
"""What curves may be drawn over: steps, seconds of all steps so far, tokens sampled so far."""


@dataclass(slots=True)
class MetricTable:
    """A run's `metrics.jsonl` in columns; a name that a step lacks is None there."""

    tail: Tail
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    axes: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in AXES})
    generation: int = 0
    """Grows when rows were taken back: a run that was resumed or rolled back."""

    disordered: int = 0
    """Rows whose step is not after that of the row before."""
    endless: int = 0
    """Infinite numbers and NaN."""

    def __len__(self) -> int:
        return len(self.axes["step"])

    def refresh(self) -> None:
        """Read what was appended."""
        rows, anew = self.tail.read()
        if anew:
            self.columns.clear()
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
        tokens = 0.0
        for name, value in _flat(row):
            kept = self._number(value)
            if name == "step" or (kept is None and name not in self.columns):
                continue
            self.columns.setdefault(name, [None] * count).append(kept)
            tokens += (kept or 0.0) if name.startswith("tokens/") else 0.0
        for column in self.columns.values():
            if len(column) <= count:
                column.append(None)
        self.disordered += bool(count) and step <= self.axes["step"][-1]
        self.axes["step"].append(step)
        seconds = number(row.get("time/step")) or number(row.get("seconds")) or 0.0
        for axis, more in (("time", seconds), ("tokens", tokens)):
            so_far = self.axes[axis][-1] if self.axes[axis] else 0.0
            self.axes[axis].append(so_far + more)

    def _number(self, value: object) -> float | None:
        found = number(value)
        self.endless += found is None and isinstance(value, float)
        return found

    def last(self) -> dict[str, float]:
        """Return the numbers of the last step."""
        return {
            name: column[-1] for name, column in self.columns.items() if column and column[-1] is not None
        }

    def thinned(
        self, width: int, columns: Mapping[str, Sequence[float | None]] | None = None
    ) -> tuple[dict[str, list[float]], dict[str, list[float | None]]]:
        """Return axes and columns with one value for each stretch of `width` steps: its last place and its mean.

        The first stretch has the steps 1 to `width`, and so on, so that runs of any length are cut at the same steps.
        `columns` stand in for the table's own.
        """
        columns, steps = self.columns if columns is None else columns, self.axes["step"]
        numbers = [(step - 1) // width for step in steps]
        edges = [k for k in range(1, len(steps)) if width == 1 or numbers[k] != numbers[k - 1]]
        parts = list(pairwise([0, *edges, len(steps)])) if steps else []
        axes = {axis: [places[end - 1] for _, end in parts] for axis, places in self.axes.items()}
        if len(parts) == len(steps):
            return axes, {name: list(column) for name, column in columns.items()}
        return axes, {
            name: [mean(column[start:end]) for start, end in parts] for name, column in columns.items()
        }


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a row; of a list of several devices, each one's under a name of its own."""
    for name, value in row.items():
        if not isinstance(value, list):
            yield name, value
            continue
        for k, device in enumerate(value[:16]):
            yield from ((f"{name} {key}/{k}", each) for key, each in mapping(device).items())


LOOK_AGAIN = 5.0
"""Seconds after which folders are searched for new runs again; longer if a search takes long."""
STATES = {"running": "running", "finished": "finished", "interrupted": "stopped", "failed": "crashed"}
"""What a run's state is called on pages."""


@dataclass(slots=True)
class ViewedRun:
    """One run directory and what was read of it; use it under its lock."""

    key: str
    """Its name in addresses."""
    path: Path
    metrics: MetricTable
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    system: MetricTable = field(init=False)
    """What the machine was doing; its time is that between rows."""
    edition: int = 0
    """Grows when something is read of its metrics and evaluations."""
    drawn: Mapping[object, object] = field(default_factory=dict)
    """A cache of the last curves: their inputs → the curves."""
    verdict: tuple[int, Verdict] | None = None
    """The edition that was judged last, and the verdict on it."""
    _evaluated: Tail = field(init=False)
    _spread: Tail = field(init=False)
    _histograms: dict[int, dict[str, Histogram]] = field(default_factory=dict)
    _settings: tuple[float, dict[str, Any]] = (0.0, {})

    def __post_init__(self) -> None:
        self._evaluated = Tail(self.path / "evaluations.jsonl")
        self._spread = Tail(self.path / "distributions.jsonl")
        self.system = MetricTable(Tail(self.path / "system.jsonl"))

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

    def distributions(self) -> tuple[list[int], list[dict[str, Histogram]]]:
        """Return the steps whose distributions are recorded, and their histograms by name; reads what was appended."""
        rows, anew = self._spread.read()
        if anew:
            self._histograms.clear()
        for row in rows:
            if (step := whole(row.get("step"))) is not None:
                found = {name: read_histogram(value) for name, value in row.items() if name != "step"}
                self._histograms[step] = {name: each for name, each in found.items() if each is not None}
        steps = sorted(self._histograms)
        return steps, [self._histograms[step] for step in steps]

    def agents(self) -> list[str]:
        """Return the names of the run's agents, in the order of its settings."""
        team = self.settings().get("team")
        rows = team.get("agents") if isinstance(team, Mapping) else None
        return (
            [str(row["name"]) for row in rows if isinstance(row, Mapping) and "name" in row]
            if isinstance(rows, list)
            else []
        )

    def measured(self) -> dict[str, Any] | None:
        """Return the newest evaluation that has a success; None without one."""
        return next(
            (row for row in reversed(self.evaluations) if number(row.get("success")) is not None), None
        )

    @property
    def damaged(self) -> int:
        """Lines of the tables that could not be read."""
        return self.metrics.tail.damaged + self._evaluated.damaged

    def settings(self) -> Mapping[str, Any]:
        """Return the run's settings; empty if they cannot be read."""
        try:
            changed = (self.path / "config.yaml").stat().st_mtime
            if changed != self._settings[0]:
                self._settings = changed, settings_of(self.path)
        except (KapelleError, OSError, ValueError, TypeError, RecursionError):
            return {}
        return self._settings[1]

    def origin(self) -> Mapping[str, Any]:
        """Return where each setting came from; empty if that is unknown."""
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
        self._runs: dict[str, ViewedRun] = {}
        self._looked, self._pause = 0.0, LOOK_AGAIN
        self._lock = threading.Lock()

    def runs(self) -> list[ViewedRun]:
        """Return all runs, those that were changed last first."""
        with self._lock:
            if not self._runs or time.monotonic() - self._looked > self._pause:
                self._look()
            return list(self._runs.values())

    def run(self, key: str) -> ViewedRun | None:
        """Return the run of a key; None for an unknown key."""
        self.runs()
        return self._runs.get(key)

    def _look(self) -> None:
        began = time.monotonic()
        found: dict[str, ViewedRun] = {}
        for root in self.roots:
            for path in find_runs(root):
                # A run's name in addresses: its path from the folder, or its own name where it is the folder itself.
                parts = path.relative_to(root).parts if path != root else (path.name or "run",)
                key = "~".join(part.encode("utf-8", "replace").decode().replace("~", "~~") for part in parts)
                if key in found:
                    key = next(name for k in range(2, len(found) + 3) if (name := f"{key}~{k}") not in found)
                known = self._runs.get(key)
                if known is None or known.path != path:
                    known = ViewedRun(key, path, MetricTable(Tail(path / "metrics.jsonl")))
                found[key] = known
        changed: dict[str, float] = {}
        for key, run in found.items():
            try:
                changed[key] = (run.path / "status.json").stat().st_mtime
            except OSError:
                changed[key] = 0.0
        self._runs = {key: found[key] for key in sorted(found, key=changed.__getitem__, reverse=True)}
        self._looked = time.monotonic()
        self._pause = max(LOOK_AGAIN, 20 * (self._looked - began))
