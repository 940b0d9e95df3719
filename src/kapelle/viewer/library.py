"""Finds the runs in the folders of a viewer and reads them as they grow, with their metrics by name and step."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from kapelle.errors import KapelleError, RunDirectoryError
from kapelle.functional.distributions import Histogram, read_histogram
from kapelle.runs.failure import Failure, read_failure
from kapelle.runs.reader import State, read_provenance, read_status, tag_hint
from kapelle.runs.summary import find_runs, settings_of
from kapelle.runs.verdict import Verdict
from kapelle.viewer.lines import Tail, mean, number, whole

# -------- The metrics of a run by name and step

AXES = ("step", "time", "tokens")
"""The horizontal axes of curves: the step, the total time of all steps so far in seconds, and the number of tokens sampled so far."""


@dataclass(slots=True)
class MetricTable:
    """The content of a run's `metrics.jsonl` as columns, with None for steps without a value."""

    tail: Tail
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    axes: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in AXES})
    disordered: int = 0
    """The number of rows whose step is not larger than the step of the previous row."""
    endless: int = 0
    """The number of infinite values and NaN values."""

    def __len__(self) -> int:
        return len(self.axes["step"])

    def refresh(self) -> bool:
        """Read the rows that were appended, or all rows if some were removed. Returns whether the table has changed."""
        rows, replaced = self.tail.read()
        if replaced:
            self.columns.clear()
            self.disordered = self.endless = 0
            for axis in self.axes.values():
                axis.clear()
        for row in rows:
            self._take(row)
        return replaced or bool(rows)

    def _take(self, row: Mapping[str, Any]) -> None:
        step, count = number(row.get("step")), len(self)
        if step is None:
            self.tail.damaged += 1
            return
        tokens = 0.0
        for name, value in row.items():
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
        seconds = number(row.get("time/step")) or 0.0
        for axis, more in (("time", seconds), ("tokens", tokens)):
            so_far = self.axes[axis][-1] if self.axes[axis] else 0.0
            self.axes[axis].append(so_far + more)

    def _number(self, value: object) -> float | None:
        found = number(value)
        self.endless += found is None and isinstance(value, float)
        return found

    def last(self) -> dict[str, float]:
        """Return the values of the metrics at the last step."""
        return {
            name: column[-1] for name, column in self.columns.items() if column and column[-1] is not None
        }

    def thinned(
        self, width: int, columns: Mapping[str, Sequence[float | None]] | None = None
    ) -> tuple[dict[str, list[float]], dict[str, list[float | None]]]:
        """Return the axes and the columns with one value for each interval of `width` steps: the last position and the mean value.

        The first interval contains the steps 1 to `width`, so that the intervals are the same for all runs. If
        `columns` is given, it replaces the columns of the table.
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


LOOK_AGAIN = 5.0
"""The number of seconds between two searches for new runs. The interval is longer if a search takes a long time."""
MOST_AGENTS = 1000
"""The maximum number of agents for a team whose settings contain only the number of agents."""
STATES = {name: name for name in get_args(State)} | {"interrupted": "stopped"}
"""Mapping from the state of a run to the name of the state on pages."""


@dataclass(slots=True)
class ViewedRun:
    """A run directory and its data in memory. The caller must hold the lock of the run while using it."""

    key: str
    """The name of the run in URLs."""
    path: Path
    metrics: MetricTable
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    edition: int = 0
    """A counter that increases when new metrics or evaluations are read."""
    drawn: Mapping[object, object] = field(default_factory=dict)
    """A cache of the most recent curves, as a mapping from the inputs to the curves."""
    verdict: tuple[int, Verdict] | None = None
    """The edition for which the last verdict was computed, and the verdict."""
    _evaluated: Tail = field(init=False)
    _spread: Tail = field(init=False)
    _histograms: dict[int, dict[str, Histogram]] = field(default_factory=dict)
    _settings: tuple[float, dict[str, Any]] = (0.0, {})

    def __post_init__(self) -> None:
        self._evaluated = Tail(self.path / "evaluations.jsonl")
        self._spread = Tail(self.path / "distributions.jsonl")

    def refresh(self) -> None:
        """Read the rows that were appended to the tables of the run."""
        changed = self.metrics.refresh()
        rows, replaced = self._evaluated.read()
        if replaced:
            self.evaluations.clear()
        self.evaluations.extend(row for row in rows if isinstance(row.get("step"), int))
        self.edition += changed or replaced or bool(rows)

    def distributions(self) -> tuple[list[int], list[dict[str, Histogram]]]:
        """Read the rows that were appended, and return the steps with distributions and the histograms of each step by name."""
        rows, replaced = self._spread.read()
        if replaced:
            self._histograms.clear()
        for row in rows:
            if (step := whole(row.get("step"))) is not None:
                found = {name: read_histogram(value) for name, value in row.items() if name != "step"}
                self._histograms[step] = {name: each for name, each in found.items() if each is not None}
        steps = sorted(self._histograms)
        return steps, [self._histograms[step] for step in steps]

    def agents(self) -> list[str]:
        """Return the names of the agents of the run, in the order of its settings."""
        team = self.settings().get("team")
        rows = team.get("agents") if isinstance(team, Mapping) else None
        if isinstance(rows, int):
            return [f"agent_{k}" for k in range(min(rows, MOST_AGENTS))]
        return (
            [str(row["name"]) for row in rows if isinstance(row, Mapping) and "name" in row]
            if isinstance(rows, list)
            else []
        )

    def measured(self) -> dict[str, Any] | None:
        """Return the most recent evaluation with a success rate, or None if there is none."""
        return next(
            (row for row in reversed(self.evaluations) if number(row.get("success")) is not None), None
        )

    @property
    def damaged(self) -> int:
        """The number of damaged lines in the tables."""
        return self.metrics.tail.damaged + self._evaluated.damaged

    def settings(self) -> Mapping[str, Any]:
        """Return the settings of the run, or an empty mapping if they cannot be read."""
        try:
            changed = (self.path / "config.yaml").stat().st_mtime
            if changed != self._settings[0]:
                self._settings = changed, settings_of(self.path)
        except (KapelleError, OSError, ValueError, TypeError, RecursionError):
            return {}
        return self._settings[1]

    def origin(self) -> Mapping[str, Any]:
        """Return the source of each setting, or an empty mapping if the sources are unknown."""
        try:
            return read_provenance(self.path)
        except KapelleError:
            return {}

    def failure(self) -> Failure | None:
        """Return the reason why the run failed or was killed, or None for other runs and if the files of the run cannot be read."""
        try:
            return read_failure(self.path)
        except KapelleError:
            return None

    def status(self) -> dict[str, Any]:
        """Return the status of the run as it is shown on a page."""
        try:
            found = read_status(self.path)
        except KapelleError as error:
            empty = dict.fromkeys(("phase", "host", "started", "updated"), "")
            return {"state": "damaged", "step": 0, **empty, "wrong": str(error)}
        return {
            "state": STATES[found.state],
            "phase": str(found.phase),
            "step": found.step,
            "host": found.host,
            "started": str(found.started),
            "updated": str(found.updated),
            "wrong": "",
        }


class Library:
    """Finds runs and caches their data."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Create a library of the runs in and below the given folders. Raises RunDirectoryError if a folder does not exist."""
        for root in roots:
            if not root.is_dir():
                raise RunDirectoryError(
                    f"The folder {root} does not "
                    f"exist.{tag_hint(root) or ' Give a run directory, or a folder that contains run directories.'}"
                )
        self.roots = tuple(root.resolve() for root in roots)
        self._runs: dict[str, ViewedRun] = {}
        self._looked, self._pause = 0.0, LOOK_AGAIN
        self._lock = threading.Lock()

    def runs(self) -> list[ViewedRun]:
        """Return all runs, with the most recently changed run first."""
        with self._lock:
            if not self._runs or time.monotonic() - self._looked > self._pause:
                self._look()
            return list(self._runs.values())

    def run(self, key: str) -> ViewedRun | None:
        """Return the run with the given key, or None if the key is unknown."""
        self.runs()
        return self._runs.get(key)

    def _look(self) -> None:
        began = time.monotonic()
        found: dict[str, ViewedRun] = {}
        for root in self.roots:
            for path in find_runs(root):
                # A run's name in URLs: its path relative to the folder, or its own name if it is the folder itself.
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
