"""The runs that a viewer shows: found under the folders that it was given, each read as it grows."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kapelle.errors import KapelleError, RunDirectoryError
from kapelle.runs.reader import read_provenance, read_status, tag_hint
from kapelle.runs.summary import find_runs, settings_of
from kapelle.viewer.lines import Tail, number
from kapelle.viewer.table import Table, metrics_of, system_of

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
