"""The run directory: everything that a run leaves behind, in open formats; `reader` reads it.

    <run>/
      config.yaml          the resolved config; running it again repeats the run
      provenance.json      where each of its values came from; `starts`: what it ran with, see `training.provenance`
      status.json          state, phase, step, pid, host, times; see `Status`
      metrics.jsonl        one row per step: `step` and finite numbers under flat names
      evaluations.jsonl    one row per evaluation: `step` and what it measured
      episodes/train/00000012.jsonl.zst    the episodes of step 12 and some later ones, one per line; see `step_rows`, `episode_json`
      episodes/test/00000012.jsonl.zst     those of the evaluation after step 12, likewise
      images/HASH.png      what agents saw, each file once; see `types.Image`
      traces/00000012.jsonl.zst        what tokens of some of their episodes were credited with, likewise; see `Trace`
      recorded.jsonl       one row per step of these folders: how many rows it has and their digests, see `recorded`
      system.jsonl         one row per step: what the machine was doing, see `system`
      distributions.jsonl  one row per step: histograms of its rewards, advantages, lengths and tokens, see `metrics.distributions`
      ranks/0003.log       what each of several ranks does, see `rank_log`
      checkpoints/00000012/            see `checkpoint`
      latest               text: relative path of the newest checkpoint, for people; `read_latest` searches by itself
      lock                 names the process that trains the run; it and the directory are locked, see `lock`
      forgotten.json       the steps whose episodes the run itself has deleted, see `recorded`
      exact.json, evaluated.jsonl      what commands measured afterwards, see `findings`
      rolled-back/         what `kapelle runs rollback` has moved, see `rollback`

Rows of metrics and evaluations and the episodes of a step are appended with one write each; every other file is replaced in one
step. A killed process therefore leaves at worst an incomplete last line or step, which readers ignore and a
resumed run cuts off: it first rewinds to the positions in its checkpoint, so that no row is lost or
written twice. A trainer saves its start before the first row, so that there is always a checkpoint to
rewind to. Readers of episodes compare them with `recorded.jsonl`, and a resume refuses episodes that have changed since.
A config or provenance that is deleted or replaced while the run goes on is written again. A number that is not finite is refused
(NumericsError): it must be handled before it is recorded.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from kapelle.errors import NumericsError, RunDirectoryError
from kapelle.functional.distributions import Histogram
from kapelle.runs.checkpoint_folder import prune
from kapelle.runs.episode_json import Trace, dump_groups, dump_traces
from kapelle.runs.findings import FINDINGS
from kapelle.runs.lock import RunLock, now
from kapelle.runs.reader import (
    STARTS,
    State,
    Status,
    episode_folder,
    episode_steps,
    is_run,
    last_episode_step,
    read_config,
    read_provenance,
    read_starts,
    tag_hint,
)
from kapelle.runs.recorded import FOLDERS, FORGOTTEN, RECORDED, described, forgotten, refuse_losses
from kapelle.runs.step_rows import append_step, cut_steps, forgettable
from kapelle.runtime.files import PARTIAL, flush, own_file, replace_file, write_all, writing
from kapelle.types import Group, Image, Json, Split

# -------- Tables of JSON lines: how a row is written, how a table is cut.

TABLES = ("metrics.jsonl", "evaluations.jsonl", "recorded.jsonl")
"""The tables whose rows a checkpoint counts; the last one is that of `recorded`."""


def row_line(table: str, step: int, row: Mapping[str, Json]) -> bytes:
    """Return a row as it is appended; NumericsError where a number in it is not finite."""
    try:
        return json.dumps({"step": step, **row}, allow_nan=False).encode("ascii") + b"\n"
    except ValueError as error:
        raise NumericsError(f"A row of {table} for step {step} holds a number that is not finite.") from error


def pretty(value: Mapping[str, Json]) -> bytes:
    """Return a whole file of JSON, indented."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def cut_table(path: Path, size: int) -> None:
    """Leave the first `size` bytes of a table."""
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def changed_lines(old: str, new: str) -> list[str]:
    """Return what differs between two config texts, line by line, in words."""
    before, after = old.splitlines(), new.splitlines()
    gone = [f"no longer '{line.strip()}'" for line in before if line not in after]
    return gone + [f"now '{line.strip()}'" for line in after if line not in before]


_SPLITS: tuple[Split, ...] = ("train", "test")
SYSTEM, DISTRIBUTIONS = UNCOUNTED = ("system.jsonl", "distributions.jsonl")
"""Rows about the machine, and histograms for people: no checkpoint counts them; a resume cuts off those of steps that it takes again."""
_NAMES = {
    "config.yaml",
    "provenance.json",
    "status.json",
    *TABLES,
    *UNCOUNTED,
    FORGOTTEN,
    "episodes",
    "traces",
    "checkpoints",
    "images",
    "latest",
    "lock",
    "rolled-back",
    *FINDINGS,
}


def last_counted(positions: Mapping[str, int], folder: str) -> int:
    """Return the last step of a folder that a checkpoint's positions count, -1 for none; traces are those of training steps."""
    return positions.get(FOLDERS[0] if folder == "traces" else folder, -1)


def new_path(recipe: str, started: datetime | None = None, root: Path = Path("runs")) -> Path:
    """Return a folder name for a run that starts now: `runs/<recipe>-<yyyymmdd-hhmmss>`, with `-2`, `-3` … after it if taken."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(recipe).stem).strip("-.") or "run"
    path = root / f"{name}-{started or datetime.now().astimezone():%Y%m%d-%H%M%S}"
    candidates = (path, *(path.with_name(f"{path.name}-{n}") for n in range(2, 10_000)))
    return next(candidate for candidate in candidates if not candidate.exists())


@contextmanager
def new_folder(name: str, root: Path = Path("runs")) -> Iterator[Path]:
    """Make and yield the folder that `new_path` names; if the block fails before anything is in it, it is removed again.

    Of several processes that begin in the same second each gets a folder of its own. Raises RunDirectoryError.
    """
    beside = root.is_dir()
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
    while True:
        path = new_path(name, root=root)
        with writing(path), suppress(FileExistsError):
            path.mkdir()
            break
    try:
        yield path
    except BaseException:
        with suppress(OSError):  # what a run has written stays
            path.rmdir()
            if not beside:
                root.rmdir()
        raise


class RunDirectory:
    """A run directory that only this process writes to.

    Use it as a context manager: it marks the run as failed or interrupted when an exception leaves
    the block, and releases the lock. Every write raises RunDirectoryError when the disk refuses.
    """

    def __init__(self, path: Path, lock: RunLock, *, resumed: bool) -> None:
        self.path = path
        self.say: Callable[[str], None] = lambda _: None
        """Called with a line when a file was removed or replaced that the run can do without."""
        self._own: dict[str, bytes] = {}
        """Content of the files that make this folder a run, by name."""
        self._marks: dict[str, tuple[int, ...]] = {}
        """What `_mark` returned for those files when they were last looked at."""
        self._ends: dict[str, int] = {}
        """Bytes of the tables, as far as this process has written them."""
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
                    f"There is no run at {path} to resume.{tag_hint(path) or ' Leave out --resume to start it.'}"
                )
            path.mkdir(parents=True, exist_ok=True)
            strangers = sorted(
                {entry.name for entry in path.iterdir()} - _NAMES - {f".{name}{PARTIAL}" for name in _NAMES}
            )
        if strangers and not is_run(path):
            raise RunDirectoryError(
                f"{path} is not empty and not a run of kapelle: it holds '{strangers[0]}'.{tag_hint(path) or ' Choose another --run-dir.'}"
            )
        # With what is left of a run without its config a new run would be mixed.
        if not is_run(path):
            tables = [path / table for table in TABLES]
            left = [table for table in tables if table.is_file() and table.stat().st_size]
            left += [*path.glob("checkpoints/[0-9]*"), *path.glob("episodes/*/[0-9]*")]
            if left:
                config_there = (path / "config.yaml").is_file()
                missing = "neither lock nor metrics.jsonl" if config_there else "no config.yaml"
                raise RunDirectoryError(
                    f"{path} holds what a run has left ('{left[0].relative_to(path)}') and {missing}. Put that back from a copy, or "
                    "name another --run-dir."
                )
        lock = RunLock(path / "lock")
        try:
            run = cls(path, lock, resumed=is_run(path))
            if run.resumed and not resume:
                raise RunDirectoryError(
                    f"{path} already holds a run. Continue it with --resume, or choose another --run-dir (in Python: `resume=True`, or another `run_dir`)."
                )
            changed = differences(read_config(path), config) if run.resumed else ()
            if changed:
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                raise RunDirectoryError(
                    f"The run at {path} has another config: {changed[0]}{more}. "
                    f"Resume it with {path / 'config.yaml'}, or choose another --run-dir."
                )
            with run._write(run.path):
                for folder in (run.checkpoints, *(run.path / name for name in FOLDERS)):
                    folder.mkdir(parents=True, exist_ok=True)
                # Flushes the names of the two episode folders; those of the others are flushed with the config.
                flush(episode_folder(run.path, "train").parent)
                for table in (*TABLES, *UNCOUNTED):
                    own_file(run.path / table)
                starts = read_starts(path)
                kept = {STARTS: starts} if starts else {}
                run._put("provenance.json", pretty({**provenance, **kept}))
                run.report("start", run._status.step)
                # Last, because a directory is a run from the moment it has a config.
                run._put("config.yaml", config.encode())
        except BaseException:
            lock.release()
            raise
        return run

    @contextmanager
    def _write(self, path: Path) -> Iterator[None]:
        """Check that only this process has the run, and turn the disk's errors inside the block into RunDirectoryError."""
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

    def _put(self, name: str, content: bytes) -> None:
        replace_file(self.path / name, content)
        self._own[name], self._marks[name] = content, _mark(self.path / name)

    def _put_back(self) -> None:
        """Write the files that make this folder a run again if they were removed or replaced."""
        for name, content in self._own.items():
            path = self.path / name
            mark = _mark(path)
            if mark == self._marks[name]:
                continue
            try:
                found = path.read_bytes()
            except OSError:
                found = None
            if found != content:
                aside = path.with_name(f"{name}.replaced")
                if path.is_dir() and not path.is_symlink():
                    path.rename(aside)
                elif found is not None:
                    replace_file(aside, found)
                self._put(name, content)
                what = "replaced" if mark else "removed"
                kept = (
                    f" What stood there is in {aside.name}; to use it, stop the run and resume it with that file."
                    if mark
                    else ""
                )
                self.say(f"{path} was {what} while the run goes on; it was written again.{kept}")
            self._marks[name] = _mark(path)

    def record_start(self, start: Mapping[str, Json]) -> None:
        """Record the circumstances under which this process starts or resumes the run."""
        file = self.path / "provenance.json"
        with self._write(file):
            starts = [*read_starts(self.path), dict(start)]
            self._put(file.name, pretty({**read_provenance(self.path), STARTS: starts}))

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
            # A run goes on without the rows that no checkpoint counts.
            made = os.O_CREAT if table in UNCOUNTED else 0
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | made, 0o644)
            except FileNotFoundError:
                raise _changed(path, "was removed") from None
            try:
                size = os.fstat(descriptor).st_size
                self._refuse_changed(table, size)
                try:
                    write_all(descriptor, line)
                except OSError:
                    # A full disk may have taken part of the row; the next row must not continue it.
                    with suppress(OSError):
                        os.ftruncate(descriptor, size)
                    raise
                if table in TABLES:
                    self._ends[table] = size + len(line)
            finally:
                os.close(descriptor)
        self._unflushed.add(path)

    def _refuse_changed(self, table: str, size: int) -> None:
        known = self._ends.get(table, size)
        if size != known:
            raise _changed(
                self.path / table, f"has {size} bytes instead of {known}: another program has changed it"
            )

    def record_episodes(self, step: int, groups: Sequence[Group], split: Split = "train") -> None:
        """Write all episodes of a step, or (`test`) of the evaluation after it; only once for each step."""
        assert self._rewound, "a resumed run rewinds before it records"
        self._record(step, f"episodes/{split}", dump_groups(step, groups, self._keep))

    def _keep(self, image: Image) -> None:
        """Write an image's file, once for all steps."""
        path = self.path / "images" / image.file
        if not path.is_file():
            with self._write(path):
                path.parent.mkdir(exist_ok=True)
                replace_file(path, image.data)

    def _record(self, step: int, name: str, content: bytes) -> None:
        folder = self.path / name
        with self._write(folder):
            if not folder.is_dir():
                raise _changed(folder, "was removed")
            path, data = append_step(folder, step, content)
        self._unflushed |= {path, folder}
        # Last, so that readers do not miss what a killed process was writing.
        self._append(RECORDED, step, described(name, content, data))

    def record_traces(self, step: int, traces: Sequence[Trace]) -> None:
        """Write the traces of a step's episodes, if there are any."""
        if traces:
            self._record(step, "traces", dump_traces(step, traces))

    def record_system(self, step: int, row: Mapping[str, Json]) -> None:
        """Append what the machine was doing during a step."""
        self._append(SYSTEM, step, row)

    def record_distributions(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Append the histograms of a step, if there are any."""
        if found:
            self._append(DISTRIBUTIONS, step, {name: each.row() for name, each in found.items()})

    def positions(self) -> dict[str, int]:
        """Flush all rows to the disk and return where they end; a checkpoint stores this."""
        with writing(self.path):
            for path in sorted(self._unflushed):
                flush(path)
            self._unflushed.clear()
            self._put_back()
            ends = {table: (self.path / table).stat().st_size for table in TABLES}
        for table, end in ends.items():
            self._refuse_changed(table, end)
        return ends | {f"episodes/{split}": last_episode_step(self.path, split) for split in _SPLITS}

    def start_anew(self) -> None:
        """Let a resumed run that was stopped before its first checkpoint start from the beginning.

        Raises RunDirectoryError when it holds rows or episodes: no checkpoint could bring them back.
        """
        rows = any(b"\n" in (self.path / table).read_bytes() for table in TABLES)
        if rows or any(episode_steps(self.path, split) for split in _SPLITS):
            raise RunDirectoryError(
                f"{self.path} holds rows or episodes but no checkpoint to continue from; resuming would delete them. Restore "
                f"its checkpoints, or start anew elsewhere: `kapelle train {shlex.quote(str(self.path / 'config.yaml'))} --run-dir OTHER`."
            )
        self.rewind(dict.fromkeys(TABLES, 0))

    def rewind(self, positions: Mapping[str, int], measured: int | None = None) -> None:
        """Cut off all rows and episodes after these positions, which are those in a checkpoint.

        Evaluations of steps up to `measured` stay, so that a run that had ended there and is now continued does not measure
        the checkpoint's weights again. Raises RunDirectoryError when a file is shorter than its position or no row ends there.
        """
        with self._write(self.path):
            ends = {table: positions.get(table, 0) for table in TABLES}
            last = {folder: last_counted(positions, folder) for folder in FOLDERS}
            for table in (*TABLES, *UNCOUNTED):
                own_file(self.path / table)
            for table in TABLES:
                with (self.path / table).open("rb") as file:
                    file.seek(max(0, ends[table] - 1))
                    if ends[table] and file.read(1) != b"\n":
                        raise RunDirectoryError(
                            f"{self.path / table} has lost rows that its checkpoint counts ({ends[table]} bytes). Restore the "
                            "file, or start again in another --run-dir."
                        )
            for remark in refuse_losses(self.path, positions):
                self.say(f"{remark}; the run continues without them")
            if measured is not None:
                for name in ("evaluations.jsonl", RECORDED):
                    # Complete rows that follow, of steps up to `measured`.
                    for line in (self.path / name).read_bytes()[ends[name] :].splitlines(keepends=True):
                        try:
                            if not line.endswith(b"\n") or json.loads(line)["step"] > measured:
                                break
                        except (ValueError, KeyError, TypeError, RecursionError):
                            break
                        ends[name] += len(line)
                last["episodes/test"] = max(last["episodes/test"], measured)
            for table, end in ends.items():
                cut_table(self.path / table, end)
            self._ends = dict(ends)
            for table in UNCOUNTED:
                self._cut_uncounted(self.path / table, last[FOLDERS[0]])
            lines = (self.path / "evaluations.jsonl").read_bytes().splitlines(keepends=True)
            self._counted = lines[-1] if lines else None
            for folder, step in last.items():
                cut_steps(self.path / folder, step)
            gone = forgotten(self.path)
            if any(before > last[folder] + 1 for folder, before in gone.items()):
                # These steps are played again, and their episodes are then no longer the deleted ones.
                gone = {folder: min(before, last[folder] + 1) for folder, before in gone.items()}
                replace_file(self.path / FORGOTTEN, pretty(gone))
            self._unflushed = {path for path in self._unflushed if path.exists()}
        self._rewound = True

    def _cut_uncounted(self, path: Path, last: int) -> None:
        """Leave one row of such a table for each step up to `last`, and no half-written one."""
        before = path.read_bytes()
        kept: dict[object, bytes] = {}
        for number, line in enumerate(before.splitlines(keepends=True)):
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError, RecursionError):
                step = None
            if type(step) is not int:
                step = ("damaged", number)  # stays, for readers to say so
            elif step > last:
                continue
            if line.endswith(b"\n"):
                kept.pop(step, None)
                kept[step] = line
        after = b"".join(kept.values())
        if after != before:
            replace_file(path, after)

    def report(self, phase: str, step: int, state: State = "running") -> None:
        """Record what the run is doing, or how it ended."""
        self._status = replace(self._status, phase=phase, step=step, state=state, updated=now())
        # As `pretty` writes it; `json` would leave reference cycles behind when it indents, at every report.
        rows = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in asdict(self._status).items()]
        with self._write(self.path / "status.json"):
            self._put_back()
            replace_file(self.path / "status.json", ("{\n" + ",\n".join(rows) + "\n}\n").encode(), sync=False)

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
        before = done - keep + 1
        for name in ("episodes/train", "traces") if split == "train" else ("episodes/test",):
            with self._write(self.path / name):
                files = forgettable(self.path / name, before)
                if files:
                    # First, so that readers do not miss deleted steps, whenever this process is killed.
                    known = forgotten(self.path)
                    end = max(known.get(name, 0), *(last + 1 for last in files.values()))
                    replace_file(self.path / FORGOTTEN, pretty({**known, name: end}))
                for path in files:
                    path.unlink()

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


def _mark(path: Path) -> tuple[int, ...]:
    """Return what `stat` says that changes whenever a file is replaced or written; empty if there is no file."""
    try:
        about = path.stat()
    except OSError:
        return ()
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def _changed(path: Path, how: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path} {how} while the run was trained. Put it back from a copy if there is one, and continue from the newest "
        "checkpoint: `kapelle train --resume RUN`."
    )
