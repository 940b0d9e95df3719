"""Writes the run directory, which contains all files of a run in open formats. The module `reader` reads these files.

    <run>/
      config.yaml          the resolved config, with which this run can be repeated
      provenance.json      the source of each of its values; `starts`: the environment of each start, see `training.provenance`
      status.json          state, phase, step, pid, host, times; see `Status`
      failure.json         why the run has failed; see `failure`
      run.log              text: what the terminal showed, with times, and every failure
      metrics.jsonl        one row per step: `step` and finite numbers under flat names
      evaluations.jsonl    one row per evaluation: `step` and the results
      episodes/train/00000012.jsonl.zst    the episodes of step 12 and some later steps, one per line; see `step_rows`, `episode_json`
      episodes/test/00000012.jsonl.zst     the episodes of the evaluation after step 12
      images/HASH.png      images in agents' prompts, each stored once; see `types.Image`
      traces/00000012.jsonl.zst        the credit of each token of some of these episodes; see `Trace`
      recorded.jsonl       one row for each step in these folders: the number of its rows and their digests, see `recorded`
      system.jsonl         one row per step: use of the machine's resources, see `system`
      distributions.jsonl  one row per step: histograms of its rewards, advantages, lengths and tokens, see `metrics.distributions`
      ranks/0003.log       log of each of several ranks, see `rank_log`
      checkpoints/00000012/            see `checkpoint`
      latest               text: relative path of the newest checkpoint, for people; `read_latest` does not use it
      lock                 contains the process that trains the run; this file and the directory are locked, see `lock`
      forgotten.json       the steps whose episodes the run itself has deleted, see `recorded`
      exact.json, evaluated.jsonl      results of later commands, see `findings`
      rolled-back/         files that `kapelle runs rollback` has moved, see `rollback`

The rows of metrics and evaluations and the episodes of a step are appended with one write each. All other files are
replaced atomically. Therefore, a killed process leaves at most an incomplete last line or step, which readers ignore. A
resumed run removes an incomplete line or step by rewinding to the positions in its checkpoint, so that no row is lost
or written twice. A trainer saves a checkpoint before it writes the first row, so that rewinding is always possible.
Readers of episodes compare them with `recorded.jsonl`, and resuming a run raises RunDirectoryError if the episodes have
changed. A non-finite number raises NumericsError, so the caller must handle such numbers before it records them.
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
from kapelle.runs.failure import FAILURE, LOG, failure_of, start_line
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
from kapelle.runs.recorded import FOLDERS, FORGOTTEN, RECORDED, check_recorded, described, forgotten
from kapelle.runs.step_rows import append_step, cut_steps, forgettable
from kapelle.runtime.characters import cleaned
from kapelle.runtime.files import PARTIAL, flush, own_file, replace_file, write_all, writing
from kapelle.runtime.interrupts import requested_by
from kapelle.runtime.machine import run_logs
from kapelle.types import Group, Image, Json, Split

# -------- Tables of JSON lines: write a row, truncate a table.

TABLES = ("metrics.jsonl", "evaluations.jsonl", "recorded.jsonl")
"""The tables whose positions are stored in checkpoints. The table `recorded.jsonl` is described in `recorded`."""


def row_line(table: str, step: int, row: Mapping[str, Json]) -> bytes:
    """Return the line that is appended for a row. Raises NumericsError for a non-finite number."""
    try:
        return json.dumps({"step": step, **row}, allow_nan=False).encode("ascii") + b"\n"
    except ValueError as error:
        raise NumericsError(f"A row of {table} for step {step} contains a non-finite number.") from error


def pretty(value: Mapping[str, Json]) -> bytes:
    """Return the content of a JSON file with indentation."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def cut_table(path: Path, size: int) -> None:
    """Truncate a table to its first `size` bytes."""
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def changed_lines(old: str, new: str) -> list[str]:
    """Return the lines that differ between two config files, as phrases."""
    before, after = old.splitlines(), new.splitlines()
    gone = [f"no longer '{line.strip()}'" for line in before if line not in after]
    return gone + [f"now '{line.strip()}'" for line in after if line not in before]


_SPLITS: tuple[Split, ...] = ("train", "test")
SYSTEM, DISTRIBUTIONS = UNCOUNTED = ("system.jsonl", "distributions.jsonl")
"""The tables with the use of the machine and with histograms, which checkpoints do not count. A resume removes the rows of the
steps that it repeats."""
_NAMES = {
    "config.yaml",
    "provenance.json",
    "status.json",
    FAILURE,
    LOG,
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
    """Return the last step of a folder that the positions of a checkpoint count, or -1 if there is none.

    Traces belong to training steps.
    """
    return positions.get(FOLDERS[0] if folder == "traces" else folder, -1)


def new_path(recipe: str, started: datetime | None = None, root: Path = Path("runs")) -> Path:
    """Return an unused folder name `runs/<recipe>-<yyyymmdd-hhmmss>` for a run that starts now.

    If the name is already used, `-2`, `-3` and so on are appended.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(recipe).stem).strip("-.") or "run"
    path = root / f"{name}-{started or datetime.now().astimezone():%Y%m%d-%H%M%S}"
    candidates = (path, *(path.with_name(f"{path.name}-{n}") for n in range(2, 10_000)))
    return next(candidate for candidate in candidates if not candidate.exists())


@contextmanager
def new_folder(name: str, root: Path = Path("runs")) -> Iterator[Path]:
    """Create and yield the folder whose name `new_path` returns. If the block fails while the folder is empty, the folder is removed.

    Processes that start in the same second get different folders. Raises RunDirectoryError if the folder cannot be
    created.
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
        with suppress(OSError):  # rmdir does not remove folders that contain files
            path.rmdir()
            if not beside:
                root.rmdir()
        raise


class RunDirectory:
    """A run directory to which only this process writes.

    The object is a context manager. If an exception leaves the block, the run is marked as failed or interrupted. The
    lock is released at the end of the block. Every write raises RunDirectoryError if the disk fails.
    """

    def __init__(self, path: Path, lock: RunLock, *, resumed: bool) -> None:
        self.path = path
        self.say: Callable[[str], None] = lambda _: None
        """A function that is called with a message when a resume continues although files are missing."""
        self._ends: dict[str, int] = {}
        """The number of bytes of each table that this process has read or written."""
        self.resumed = resumed
        """Whether the directory already contained this run. If true, `rewind` must be called before anything is recorded."""
        self._lock = lock
        self._rewound = not resumed
        self._counted: bytes | None = None
        """The last evaluation row that the checkpoint counts, until another row is recorded."""
        self._unflushed: set[Path] = set()
        self._status = Status("running", "start", 0, os.getpid(), socket.gethostname(), now(), now())
        self._log: int | None = None
        """The file descriptor of `run.log`, or None if the file cannot be opened or if this process does not own the run yet."""

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
        """Create a new run directory or, if `resume` is true, open an existing one, and lock it.

        The function `differences(old, new)` lists the changes in the config that prevent a resume. A caller that allows
        changes (such as more steps) passes its own function, and the new config is then stored.

        Raises RunDirectoryError if the directory is in use or holds other files or another config, if it is already a
        run and `resume` is not set, or if it is not a run and `resume` is set.
        """
        with writing(path):
            if resume and not (path.is_dir() and any(path.iterdir())):
                raise RunDirectoryError(
                    f"There is no run at {path} to "
                    f"resume.{tag_hint(path) or ' Remove --resume to start a new run.'}"
                )
            path.mkdir(parents=True, exist_ok=True)
            others = sorted(
                {entry.name for entry in path.iterdir()} - _NAMES - {f".{name}{PARTIAL}" for name in _NAMES}
            )
        if others and not is_run(path):
            raise RunDirectoryError(
                f"{path} is not empty, but is not a kapelle run: it contains "
                f"'{others[0]}'.{tag_hint(path) or ' Choose another --run-dir.'}"
            )
        # A new run must not be mixed with the files of a run without its config.
        if not is_run(path):
            tables = [path / table for table in TABLES]
            left = [table for table in tables if table.is_file() and table.stat().st_size]
            left += [*path.glob("checkpoints/[0-9]*"), *path.glob("episodes/*/[0-9]*")]
            if left:
                config_there = (path / "config.yaml").is_file()
                missing = "neither lock nor metrics.jsonl" if config_there else "no config.yaml"
                raise RunDirectoryError(
                    f"{path} contains files of a run ('{left[0].relative_to(path)}'), but {missing}. "
                    "Restore what is missing from a copy, or "
                    "choose another --run-dir."
                )
        lock = RunLock(path / "lock")
        try:
            run = cls(path, lock, resumed=is_run(path))
            if run.resumed and not resume:
                raise RunDirectoryError(
                    f"{path} already contains a run. Continue it with --resume, or choose another --run-dir (in Python: `resume=True`, or another `run_dir`)."
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
                # This flushes the names of the two episode folders; writing the config flushes the other names.
                flush(episode_folder(run.path, "train").parent)
                for table in (*TABLES, *UNCOUNTED):
                    own_file(run.path / table)
                starts = read_starts(path)
                kept = {STARTS: starts} if starts else {}
                replace_file(path / "provenance.json", pretty({**provenance, **kept}))
                run.report("start", run._status.step)
                (path / FAILURE).unlink(missing_ok=True)
                run._open_log()
                # The config is written last, because a directory with a config is a run.
                replace_file(path / "config.yaml", config.encode())
        except BaseException:
            lock.release()
            raise
        return run

    @contextmanager
    def _write(self, path: Path) -> Iterator[None]:
        """Check that this process owns the run, and convert OSError inside the block to RunDirectoryError."""
        self._lock.recheck()
        with writing(path):
            try:
                yield
            except OSError:
                self._lock.recheck()  # raises the reason if this process has lost the run
                raise

    def _open_log(self) -> None:
        """Open `run.log` if possible. If the file cannot be opened, the run continues without it."""
        with suppress(OSError):
            own_file(self.path / LOG)
            self._log = os.open(self.path / LOG, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            run_logs.append(self._log)
            self.log(start_line(self._status))

    def log(self, text: str) -> None:
        """Append a line with the current time to `run.log`. If the disk cannot store the line, the run continues."""
        if self._log is not None:
            with suppress(OSError):
                write_all(self._log, f"{now()} {cleaned(text)}\n".encode())

    def fail(self, error: Exception) -> None:
        """Record the reason why the run has failed in `failure.json`, in `run.log` and in the status."""
        failure = failure_of(error, self._status, self.path)
        self.log("\n".join(["failed", *failure.lines(), failure.traceback]))
        # The disk may have caused the error; another error from the disk must not replace it.
        with suppress(RunDirectoryError):
            with self._write(self.path / FAILURE):
                replace_file(self.path / FAILURE, pretty(failure.row()))
            self.report(self._status.phase, self._status.step, "failed")

    def recheck(self) -> None:
        """Raise RunDirectoryError unless this process is the only owner of the run. Call this method before changing files."""
        self._lock.recheck()

    def record_start(self, start: Mapping[str, Json]) -> None:
        """Record the environment in which this process starts or resumes the run."""
        file = self.path / "provenance.json"
        with self._write(file):
            starts = [*read_starts(self.path), dict(start)]
            replace_file(file, pretty({**read_provenance(self.path), STARTS: starts}))

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def record_metrics(self, step: int, row: Mapping[str, float]) -> None:
        """Append the metrics of a step. Raises NumericsError, which names the metric with a non-finite value."""
        wrong = [name for name, value in row.items() if not math.isfinite(value)]
        if wrong:
            raise NumericsError(
                f"Metric '{wrong[0]}' of step {step} is {row[wrong[0]]}; it must be a finite number."
            )
        self._append("metrics.jsonl", step, row)

    def record_evaluation(self, step: int, row: Mapping[str, Json]) -> None:
        """Append an evaluation after `step` updates, which may be any JSON mapping with finite numbers.

        The first evaluation of a resumed run may measure the same weights as the last evaluation that its checkpoint
        counts. If the two rows are identical, the row is not written again.
        """
        counted, self._counted = self._counted, None
        if counted is None or row_line("evaluations.jsonl", step, row) != counted:
            self._append("evaluations.jsonl", step, row)

    def _append(self, table: str, step: int, row: Mapping[str, Json]) -> None:
        assert self._rewound, "a resumed run rewinds before it records"
        assert "step" not in row, "the step is a separate argument"
        line = row_line(table, step, row)
        path = self.path / table
        with self._write(path):
            create = os.O_CREAT if table in UNCOUNTED else 0
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | create, 0o644)
            except FileNotFoundError:
                raise _changed(path, "was removed") from None
            try:
                size = os.fstat(descriptor).st_size
                self._check_size(table, size)
                try:
                    write_all(descriptor, line)
                except OSError:
                    # If the disk is full, it may hold a part of the row; the next row must not continue that part.
                    with suppress(OSError):
                        os.ftruncate(descriptor, size)
                    raise
                if table in TABLES:
                    self._ends[table] = size + len(line)
            finally:
                os.close(descriptor)
        self._unflushed.add(path)

    def _check_size(self, table: str, size: int) -> None:
        known = self._ends.get(table, size)
        if size != known:
            raise _changed(
                self.path / table,
                f"has {size} bytes instead of {known}, because another program has changed it",
            )

    def record_episodes(self, step: int, groups: Sequence[Group], split: Split = "train") -> None:
        """Write all episodes of a step or, for the split `test`, of the evaluation after the step. Call this method once for each step."""
        assert self._rewound, "a resumed run rewinds before it records"
        self._record(step, f"episodes/{split}", dump_groups(step, groups, self._write_image))

    def _write_image(self, image: Image) -> None:
        """Write the file of an image unless the file exists."""
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
        # Written last, so that readers do not report the step that a killed process was writing as missing.
        self._append(RECORDED, step, described(name, content, data))

    def record_traces(self, step: int, traces: Sequence[Trace]) -> None:
        """Write the traces of the episodes of a step, if there are any."""
        if traces:
            self._record(step, "traces", dump_traces(step, traces))

    def record_system(self, step: int, row: Mapping[str, Json]) -> None:
        """Append the use of the machine's resources during a step."""
        self._append(SYSTEM, step, row)

    def record_distributions(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Append the histograms of a step, if there are any."""
        if found:
            self._append(DISTRIBUTIONS, step, {name: each.row() for name, each in found.items()})

    def positions(self) -> dict[str, int]:
        """Flush all rows to the disk and return the positions of their ends, which are stored in a checkpoint."""
        with writing(self.path):
            for path in sorted(self._unflushed):
                flush(path)
            self._unflushed.clear()
            ends = {table: (self.path / table).stat().st_size for table in TABLES}
        for table, end in ends.items():
            self._check_size(table, end)
        return ends | {f"episodes/{split}": last_episode_step(self.path, split) for split in _SPLITS}

    def start_over(self) -> None:
        """Prepare a resumed run that was stopped before its first checkpoint to start from the beginning.

        Raises RunDirectoryError if the run holds rows or episodes, because a resume would delete them.
        """
        rows = any(b"\n" in (self.path / table).read_bytes() for table in TABLES)
        if rows or any(episode_steps(self.path, split) for split in _SPLITS):
            raise RunDirectoryError(
                f"{self.path} contains rows or episodes but no checkpoint to resume from; a resume would delete them. Restore "
                f"its checkpoints, or start another run: `kapelle train {shlex.quote(str(self.path / 'config.yaml'))} --run-dir OTHER`."
            )
        self.rewind(dict.fromkeys(TABLES, 0))

    def rewind(self, positions: Mapping[str, int], measured: int | None = None) -> None:
        """Remove all rows and episodes after the positions in a checkpoint.

        Evaluations of steps up to `measured` are kept, so that a run that had finished at this step need not repeat
        them when it continues. Raises RunDirectoryError if a file is shorter than its position or no row ends there.
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
                            f"{self.path / table} has lost rows that its checkpoint counts "
                            f"({ends[table]} bytes). Restore the file from a copy, or start a run in "
                            "another --run-dir."
                        )
            for remark in check_recorded(self.path, positions):
                self.say(f"{remark}; the run continues without them")
            if measured is not None:
                for name in ("evaluations.jsonl", RECORDED):
                    # Complete rows after the position, of steps up to `measured`.
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
                # These steps are repeated; their new episodes are not deleted.
                gone = {folder: min(before, last[folder] + 1) for folder, before in gone.items()}
                replace_file(self.path / FORGOTTEN, pretty(gone))
            self._unflushed = {path for path in self._unflushed if path.exists()}
        self._rewound = True

    def _cut_uncounted(self, path: Path, last: int) -> None:
        """Keep only one complete row for each step up to `last` in a table that checkpoints do not count."""
        before = path.read_bytes()
        kept: dict[object, bytes] = {}
        for number, line in enumerate(before.splitlines(keepends=True)):
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError, RecursionError):
                step = None
            if type(step) is not int:
                step = ("damaged", number)  # a damaged row is kept, so that readers report it
            elif step > last:
                continue
            if line.endswith(b"\n"):
                kept.pop(step, None)
                kept[step] = line
        after = b"".join(kept.values())
        if after != before:
            replace_file(path, after)

    def report(self, phase: str, step: int, state: State = "running") -> None:
        """Record the current activity of the run, or how the run ended."""
        self._status = replace(self._status, phase=phase, step=step, state=state, updated=now())
        # This writes the format of `pretty` without indentation by `json`, whose encoder then leaves reference cycles.
        rows = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in asdict(self._status).items()]
        with self._write(self.path / "status.json"):
            replace_file(self.path / "status.json", ("{\n" + ",\n".join(rows) + "\n}\n").encode(), sync=False)

    def point_latest(self, checkpoint: Path) -> None:
        """Write the path of a checkpoint, relative to the run, into the file `latest`."""
        with self._write(self.path / "latest"):
            replace_file(self.path / "latest", f"{checkpoint.relative_to(self.path).as_posix()}\n".encode())

    def prune(self, keep: int, newest: Path, best: Path | None = None) -> list[Path]:
        """Delete old checkpoints as described in `checkpoint_folder.prune`, and return the deleted folders."""
        self._lock.recheck()
        return prune(self.checkpoints, keep, newest, best)

    def forget_episodes(self, split: Split, done: int, keep: int | None) -> None:
        """Delete the files (episodes and traces) that hold only steps before the newest `keep` steps up to `done`.

        If `keep` is None, all files are kept.
        """
        if keep is None:
            return
        before = done - keep + 1
        for name in ("episodes/train", "traces") if split == "train" else ("episodes/test",):
            with self._write(self.path / name):
                files = forgettable(self.path / name, before)
                if files:
                    # Written first, so that readers never report deleted steps as missing, even after a kill.
                    known = forgotten(self.path)
                    end = max(known.get(name, 0), *(last + 1 for last in files.values()))
                    replace_file(self.path / FORGOTTEN, pretty({**known, name: end}))
                for path in files:
                    path.unlink()

    def close(self) -> None:
        """Release the lock and close the log."""
        if self._log is not None:
            run_logs.remove(self._log)
            os.close(self._log)
            self._log = None
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        # A stop signal that arrives inside a library's code can appear as any error.
        if self._status.state == "running" and isinstance(error, Exception) and not requested_by():
            self.fail(error)
        elif self._status.state == "running":
            with suppress(RunDirectoryError):
                self.report(self._status.phase, self._status.step, "interrupted")
        self.close()


def _changed(path: Path, how: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path} {how} while the run was trained. Restore it from a copy if there is one, and resume from the newest "
        "checkpoint: `kapelle train --resume RUN`."
    )
