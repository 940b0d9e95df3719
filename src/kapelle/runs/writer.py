"""The run directory: everything that a run leaves behind, in open formats; `reader` reads it.

    <run>/
      config.yaml          the resolved config; running it again repeats the run
      provenance.json      where each of its values came from; `starts`: what it ran with, see `circumstances`
      status.json          state, phase, step, pid, host, times; see `Status`
      metrics.jsonl        one row per step: `step` and finite numbers under flat names
      evaluations.jsonl    one row per evaluation: `step` and what it measured
      episodes/train/00000012.jsonl.zst    the episodes of step 12 and some later ones, one per line; see `step_rows`, `episode_json`
      episodes/test/00000012.jsonl.zst     those of the evaluation after step 12, likewise
      traces/00000012.jsonl            what tokens of some of step 12's episodes were credited with, see `traces`
      system.jsonl         one row per step: what the machine was doing, see `system`
      checkpoints/00000012/            see `checkpoint`
      latest               text: relative path of the newest checkpoint, for people; `read_latest` searches itself
      lock                 names the process that has the run; it and the directory are locked, see `lock`
      exact.json, evaluated.jsonl      what commands found out about it afterwards, see `findings`
      rolled-back/         what `kapelle runs rollback` has moved, see `rollback`

Rows of metrics and evaluations and the episodes of a step are appended with one write each; every other file is replaced in one
step. A killed process therefore leaves at worst an incomplete last line or step, which readers ignore and a
resumed run cuts off: it first rewinds to the positions in its checkpoint, so that no row is lost or
written twice. A trainer saves its start before the first row, so that there is always a checkpoint to
rewind to. A number that is not finite is refused (NumericsError): it must be handled before it is recorded.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kapelle.errors import NumericsError, RunDirectoryError
from kapelle.runs import step_writer
from kapelle.runs.checkpoint_folder import prune
from kapelle.runs.episode_json import dump_groups
from kapelle.runs.findings import FINDINGS
from kapelle.runs.lock import RunLock, now
from kapelle.runs.opening import changed_lines, refuse_other_run, refuse_run_without_config
from kapelle.runs.reader import (
    STARTS,
    State,
    Status,
    episode_folder,
    episode_steps,
    is_run,
    last_episode_step,
    read_config,
    read_episodes,
    read_evaluations,
    read_groups,
    read_latest,
    read_metrics,
    read_provenance,
    read_starts,
    read_status,
    saved_steps,
)
from kapelle.runs.tables import TABLES, cut_table, end_of_step, plain_lines, pretty, row_line
from kapelle.runs.traces import Trace, dump_traces, trace_file, traced_steps
from kapelle.runtime.atomic_files import PARTIAL, flush, own_file, replace_file, write_all, writing
from kapelle.types import Group, Json, Split

__all__ = [
    "RunDirectory",
    "State",
    "Status",
    "changed_lines",
    "default_path",
    "episode_steps",
    "is_run",
    "last_episode_step",
    "new_path",
    "read_config",
    "read_episodes",
    "read_evaluations",
    "read_groups",
    "read_latest",
    "read_metrics",
    "read_provenance",
    "read_starts",
    "read_status",
    "saved_steps",
]

_SPLITS: tuple[Split, ...] = ("train", "test")
SYSTEM = "system.jsonl"
"""Rows about the machine: no checkpoint counts them, so none is cut off."""
_NAMES = {
    "config.yaml",
    "provenance.json",
    "status.json",
    *TABLES,
    SYSTEM,
    "episodes",
    "traces",
    "checkpoints",
    "latest",
    "lock",
    "rolled-back",
    *FINDINGS,
}


def new_path(recipe: str) -> Path:
    """Return a new folder name for a run of a recipe that starts now."""
    return default_path(recipe, datetime.now().astimezone())


def default_path(recipe: str, started: datetime, root: Path = Path("runs")) -> Path:
    """Return `runs/<recipe>-<yyyymmdd-hhmmss>`, with `-2`, `-3` … after it where that exists."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(recipe).stem).strip("-.") or "run"
    path = root / f"{name}-{started:%Y%m%d-%H%M%S}"
    candidates = (path, *(path.with_name(f"{path.name}-{n}") for n in range(2, 10_000)))
    return next(candidate for candidate in candidates if not candidate.exists())


class RunDirectory:
    """A run directory that only this process writes to.

    Use it as a context manager: it marks the run as failed or interrupted when an exception leaves
    the block, and releases the lock. Every write raises RunDirectoryError when the disk refuses.
    """

    def __init__(self, path: Path, lock: RunLock, *, resumed: bool) -> None:
        self.path = path
        self.resumed = resumed
        """True when the directory already held this run: `rewind` must be called before anything is recorded."""
        self._lock = lock
        self._rewound = not resumed
        self._counted: bytes | None = None
        """The last row of evaluations that the checkpoint counts, until another one is recorded."""
        self._unflushed: set[Path] = set()
        self._status = Status("running", "start", 0, os.getpid(), socket.gethostname(), now(), now())

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        config: str,
        provenance: Mapping[str, Json],
        resume: bool,
        differences: Callable[[str, str], Sequence[str]] = changed_lines,
    ) -> RunDirectory:
        """Open a new run directory, or with `resume` the one of an earlier run, and lock it.

        `differences(old, new)` lists the changes of the config that forbid resuming. A run whose config may
        change (more steps) passes a function that allows it; the file then holds the new config.

        Raises RunDirectoryError for a directory that is in use, foreign, of another config, already
        a run without `resume`, or no run with it.
        """
        with writing(path):
            if resume and not (path.is_dir() and any(path.iterdir())):
                raise RunDirectoryError(
                    f"There is no run at {path} to resume. Leave out --resume to start it."
                )
            path.mkdir(parents=True, exist_ok=True)
            strangers = sorted({entry.name for entry in path.iterdir()} - _NAMES - _partials())
        if strangers and not is_run(path):
            raise RunDirectoryError(
                f"{path} is not empty and not a run of kapelle: it holds '{strangers[0]}'. Choose another --run-dir."
            )
        refuse_run_without_config(path)
        lock = RunLock(path / "lock")
        try:
            run = cls(path, lock, resumed=is_run(path))
            if run.resumed:
                refuse_other_run(path, config, differences, resume=resume)
            run._lay_out(config, provenance)
        except BaseException:
            lock.release()
            raise
        return run

    @contextmanager
    def _write(self, path: Path) -> Iterator[None]:
        """Make sure that only this process has the run, and turn errors of the disk inside the block into words."""
        self._lock.recheck()
        with writing(path):
            try:
                yield
            except OSError:
                self._lock.recheck()  # raises the reason, if the run is no longer ours
                raise

    def recheck(self) -> None:
        """Raise RunDirectoryError unless this process is the run's only owner; called before its files change."""
        self._lock.recheck()

    def _lay_out(self, config: str, provenance: Mapping[str, Json]) -> None:
        with self._write(self.path):
            for folder in (
                self.checkpoints,
                self.path / "traces",
                *(episode_folder(self.path, split) for split in _SPLITS),
            ):
                folder.mkdir(parents=True, exist_ok=True)
            # Flushes the names of the two episode folders; those of the others are flushed with the config.
            flush(episode_folder(self.path, "train").parent)
            for table in (*TABLES, SYSTEM):
                own_file(self.path / table)
            starts = {STARTS: self.starts} if self.starts else {}
            replace_file(self.path / "provenance.json", pretty({**provenance, **starts}))
            self.report("start", self._status.step)
            # Last, because a directory is a run from the moment it has a config.
            replace_file(self.path / "config.yaml", config.encode())

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The circumstances of each start and resume so far."""
        return read_starts(self.path)

    def record_start(self, start: Mapping[str, Json]) -> None:
        """Record the circumstances under which this process starts or resumes the run."""
        file = self.path / "provenance.json"
        with self._write(file):
            replace_file(file, pretty({**read_provenance(self.path), STARTS: [*self.starts, dict(start)]}))

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def record_metrics(self, step: int, row: Mapping[str, float]) -> None:
        """Append the metrics of a step; raises NumericsError naming a value that is not finite."""
        wrong = [name for name, value in row.items() if not math.isfinite(value)]
        if wrong:
            raise NumericsError(
                f"Metric '{wrong[0]}' of step {step} is {row[wrong[0]]}; it must be a finite number."
            )
        self._append("metrics.jsonl", step, row)

    def record_evaluation(self, step: int, row: Mapping[str, Json]) -> None:
        """Append one evaluation after `step` updates: any JSON with finite numbers.

        The first evaluation of a resumed run may equal, byte by byte, the last one that its checkpoint counts: the same
        weights were measured again. It is not written twice.
        """
        counted, self._counted = self._counted, None
        if counted is None or row_line("evaluations.jsonl", step, row) != counted:
            self._append("evaluations.jsonl", step, row)

    def _append(self, table: str, step: int, row: Mapping[str, Json]) -> None:
        assert self._rewound, "a resumed run rewinds before it records"
        assert "step" not in row, "the step is an argument of its own"
        line = row_line(table, step, row)
        path = self.path / table
        with self._write(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                size = os.fstat(descriptor).st_size
                try:
                    write_all(descriptor, line)
                except OSError:
                    # A full disk may have taken part of the row; the next row must not continue it.
                    with suppress(OSError):
                        os.ftruncate(descriptor, size)
                    raise
            finally:
                os.close(descriptor)
        self._unflushed.add(path)

    def record_episodes(self, step: int, groups: Sequence[Group], split: Split = "train") -> None:
        """Write all episodes of a step, or (`test`) of the evaluation after it; only once for each step."""
        assert self._rewound, "a resumed run rewinds before it records"
        folder = episode_folder(self.path, split)
        content = dump_groups(step, groups)
        with self._write(folder):
            path = step_writer.record(folder, step, content)
        self._unflushed |= {path, folder}

    def record_traces(self, step: int, traces: Sequence[Trace]) -> None:
        """Write the traces of a step's episodes; none leave no file."""
        if traces:
            path = trace_file(self.path, step)
            with self._write(path):
                replace_file(path, dump_traces(step, traces), sync=False)
            self._unflushed |= {path, path.parent}

    def record_system(self, step: int, row: Mapping[str, Json]) -> None:
        """Append what the machine was doing during a step."""
        self._append(SYSTEM, step, row)

    def positions(self) -> dict[str, int]:
        """Flush all rows to the disk and return where they end; a checkpoint stores this."""
        with writing(self.path):
            for path in sorted(self._unflushed):
                flush(path)
            self._unflushed.clear()
            ends = {table: (self.path / table).stat().st_size for table in TABLES}
        return ends | {f"episodes/{split}": last_episode_step(self.path, split) for split in _SPLITS}

    def start_anew(self) -> None:
        """Let a resumed run that was stopped before its first checkpoint start from the beginning.

        Raises RunDirectoryError when it holds rows or episodes: no checkpoint could bring them back.
        """
        rows = any(b"\n" in (self.path / table).read_bytes() for table in TABLES)
        if rows or any(episode_steps(self.path, split) for split in _SPLITS):
            raise RunDirectoryError(
                f"{self.path} holds rows or episodes but no checkpoint to continue from; resuming would delete them. Restore "
                f"its checkpoints, or start anew elsewhere: kapelle train {self.path / 'config.yaml'} --run-dir OTHER."
            )
        self.rewind(dict.fromkeys(TABLES, 0))

    def rewind(self, positions: Mapping[str, int], measured: int | None = None) -> None:
        """Cut off all rows and episodes after these positions, which are those in a checkpoint.

        Evaluations of steps up to `measured` stay: a run that had ended there and is now continued does not measure
        the checkpoint's weights again. Raises RunDirectoryError when a file is shorter than its position or broken
        there.
        """
        with self._write(self.path):
            ends = {table: positions.get(table, 0) for table in TABLES}
            last = {split: positions.get(f"episodes/{split}", -1) for split in _SPLITS}
            if measured is not None:
                rows = self.path / "evaluations.jsonl"
                ends[rows.name] = end_of_step(rows, ends[rows.name], measured)
                last["test"] = max(last["test"], measured)
            for table, end in ends.items():
                cut_table(self.path / table, end)
            lines = (self.path / "evaluations.jsonl").read_bytes().splitlines(keepends=True)
            self._counted = lines[-1] if lines else None
            for split in _SPLITS:
                step_writer.cut(episode_folder(self.path, split), last[split])
            for step in traced_steps(self.path):
                if step > last["train"]:
                    trace_file(self.path, step).unlink()
            self._unflushed = {path for path in self._unflushed if path.exists()}
        self._rewound = True

    def report(self, phase: str, step: int, state: State = "running") -> None:
        """Record what the run is doing, or how it ended."""
        self._status = replace(self._status, phase=phase, step=step, state=state, updated=now())
        with self._write(self.path / "status.json"):
            replace_file(self.path / "status.json", plain_lines(asdict(self._status)), sync=False)

    def point_latest(self, checkpoint: Path) -> None:
        """Let `latest` point to this checkpoint, relative to the run."""
        with self._write(self.path / "latest"):
            replace_file(self.path / "latest", f"{checkpoint.relative_to(self.path).as_posix()}\n".encode())

    def prune(self, keep: int, newest: Path, best: Path | None = None) -> list[Path]:
        """Delete old checkpoints, see `checkpoint_folder.prune`, and return what was deleted."""
        self._lock.recheck()
        return prune(self.checkpoints, keep, newest, best)

    def forget_episodes(self, split: Split, done: int, keep: int | None) -> None:
        """Delete the files that hold only episodes, and traces, of steps before the `keep` newest up to `done`; None keeps all."""
        if keep is None:
            return
        folder, before = episode_folder(self.path, split), done - keep + 1
        with self._write(folder):
            step_writer.forget(folder, before)
            for step in traced_steps(self.path) if split == "train" else ():
                if step < before:
                    trace_file(self.path, step).unlink()

    def close(self) -> None:
        """Release the lock; what was recorded stays."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._status.state == "running":
            failed = kind is not None and issubclass(kind, Exception)
            # The disk may be the reason for leaving the block; that error must not be replaced by this one.
            with suppress(RunDirectoryError):
                self.report(self._status.phase, self._status.step, "failed" if failed else "interrupted")
        self.close()


def _partials() -> set[str]:
    return {f".{name}{PARTIAL}" for name in _NAMES}
