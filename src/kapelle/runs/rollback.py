"""Rolls a run back to an earlier checkpoint. Everything after the checkpoint is moved to another folder and never deleted.

    <run>/rolled-back/20261122-015208-to-12/
      checkpoints/00000015/      later checkpoints
      episodes/train/…           later episodes; later traces are in `traces/…`
      metrics.jsonl              the removed rows; the other tables have such a file too
      stages/02-ppo/             stages that had started from this one
      rollback.json              written last: time, step, and what was moved

After a rollback, a run is equal to a run that was stopped immediately after the checkpoint was saved. Everything is
copied before anything is removed. The newest checkpoint is moved first, and rows are removed last. If the command is
killed at any time, the run can still be resumed from one of its checkpoints. The rollback is finished when the command
is run again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from kapelle.errors import CheckpointError, RunDirectoryError
from kapelle.runs import checkpoint
from kapelle.runs.checkpoint_folder import list_checkpoints, verify
from kapelle.runs.lock import RunLock
from kapelle.runs.named_checkpoint import NEAREST
from kapelle.runs.reader import is_run, no_run
from kapelle.runs.recorded import FOLDERS, check_recorded
from kapelle.runs.step_rows import LaterRows, later_parts
from kapelle.runs.writer import TABLES, RunDirectory, last_counted
from kapelle.runtime.files import flush, replace_file, step_of, writing

ASIDE = "rolled-back"
"""The name of the folder in a run that contains the files moved by rollbacks."""
DONE = "rollback.json"
_STAGE = re.compile(r"(\d\d+)-\w+")


@dataclass(frozen=True, slots=True)
class RollbackPlan:
    """The plan of a rollback, which lists everything that the rollback moves."""

    run: Path
    step: int
    to: Path
    """The checkpoint that is the newest one after the rollback."""
    aside: Path
    """The folder to which everything after the checkpoint is moved."""
    positions: Mapping[str, int]
    checkpoints: tuple[Path, ...]
    rows: Mapping[str, int]
    """Mapping from a table to the number of rows after the checkpoint."""
    episodes: tuple[LaterRows, ...]
    """The parts of the episode and trace files after the checkpoint."""
    stages: tuple[Path, ...]
    """The later stages of the same recipe."""
    unfinished: bool
    """Whether a rollback to this step was killed and must be finished."""

    @property
    def nothing(self) -> bool:
        """Whether the run is already at the step, so that there is nothing to move."""
        moved = self.checkpoints or self.episodes or self.stages or any(self.rows.values())
        return not moved and not self.unfinished

    def row(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return {
            "run": str(self.run),
            "step": self.step,
            "checkpoint": self.to.name,
            "aside": None if self.nothing else str(self.aside.relative_to(self.run)),
            "checkpoints": [folder.name for folder in self.checkpoints],
            "rows": dict(self.rows),
            "episodes": [_aside_of(part).relative_to(self.run).as_posix() for part in self.episodes],
            "stages": [folder.name for folder in self.stages],
        }


def plan_rollback(run: Path, step: int) -> RollbackPlan:
    """Return what a rollback to the checkpoint of `step` would move, without changing anything.

    Raises CheckpointError if this checkpoint is missing or damaged, with a message that lists the usable checkpoints.
    Raises RunDirectoryError for a folder that is not a run.
    """
    _check_run(run)
    folders = list_checkpoints(run / "checkpoints")
    to = _usable(run, folders, step)
    positions: Mapping[str, int] = checkpoint.read(to)["loop"]["positions"]
    rows = {table: _after(run / table, positions.get(table, 0)) for table in TABLES}
    check_recorded(run, positions)
    checkpoints = tuple(folders[folders.index(to) + 1 :])
    stages: tuple[Path, ...] = ()
    whole = run.resolve()
    own = _STAGE.fullmatch(whole.name)
    if own is not None and (whole.parent / "stages.yaml").is_file():
        later = sorted(
            (int(match[1]), folder)
            for folder in whole.parent.iterdir()
            if (match := _STAGE.fullmatch(folder.name)) and folder.is_dir() and int(match[1]) > int(own[1])
        )
        stages = tuple(folder for _, folder in later if is_run(folder))
    episodes = [
        part
        for folder in FOLDERS
        for part in later_parts(run / folder, last_counted(positions, folder))
        if part.steps
    ]
    killed = [place for place in (run / ASIDE).glob(f"*-to-{step}*") if not (place / DONE).is_file()]
    left = [place for place in killed if _can_continue(place, run, rows, [*checkpoints, *stages], episodes)]
    first = run / ASIDE / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-to-{step}"
    further = (first.with_name(f"{first.name}-{number}") for number in range(2, 10_000))
    new = next(place for place in (first, *further) if not place.exists())
    return RollbackPlan(
        run,
        step,
        to,
        left[0] if left else new,
        positions,
        checkpoints,
        {table: content.count(b"\n") for table, content in rows.items()},
        tuple(episodes),
        stages,
        bool(left),
    )


def _can_continue(
    place: Path, run: Path, rows: Mapping[str, bytes], folders: Sequence[Path], episodes: Sequence[LaterRows]
) -> bool:
    """Return whether a killed rollback can be finished, which requires that the run still holds everything that was copied."""
    taken = [place / ("stages" if _STAGE.fullmatch(f.name) else "checkpoints") / f.name for f in folders]
    kept = [(place / table, content) for table, content in rows.items() if content]
    aside = [(place / _aside_of(part).relative_to(run), part) for part in episodes]
    return (
        not any(folder.exists() for folder in taken)
        and all(not file.exists() or content.startswith(file.read_bytes()) for file, content in kept)
        and all(
            not copy.exists()
            or copy.read_bytes() == (part.file.read_bytes() if part.before is None else part.after)
            for copy, part in aside
        )
    )


def roll_back(run: Path, step: int) -> RollbackPlan:
    """Roll the run back to the checkpoint of `step` and return what was moved. If the run is already at this step, nothing is done.

    Raises the errors of `plan_rollback`, and RunDirectoryError while a trainer holds the run or one of its later
    stages.
    """
    _check_run(run)
    with ExitStack() as held:
        whole = run.resolve().parent
        # A trainer of several stages holds this lock from the first to the last stage.
        if (whole / "stages.yaml").is_file():
            held.callback(RunLock(whole / "lock").release)
        lock = RunLock(run / "lock")
        held.callback(lock.release)
        plan = plan_rollback(run, step)
        for stage in plan.stages:
            held.callback(RunLock(stage / "lock").release)
        if plan.nothing:
            return plan
        with writing(run):
            _copy_aside(plan)
            for folder in reversed(plan.stages):
                _move(folder, plan.aside / "stages" / folder.name)
            for folder in reversed(plan.checkpoints):
                _move(folder, plan.aside / "checkpoints" / folder.name)
            at = RunDirectory(run, lock, resumed=True)
            at.rewind(plan.positions)
            at.point_latest(plan.to)
            at.report("rolled back", plan.step, "interrupted")
            done = {"at": datetime.now(UTC).isoformat(timespec="seconds"), **plan.row()}
            replace_file(plan.aside / DONE, (json.dumps(done, indent=1) + "\n").encode())
    return plan


def fault_of(folder: Path) -> str | None:
    """Return the reason why training cannot continue from a checkpoint, or None if it can. The whole content of the checkpoint is read."""
    try:
        verify(folder)
        wrong = checkpoint.poison_in(folder)
    except CheckpointError as error:
        return str(error)
    return None if wrong is None else f"Checkpoint {folder} is damaged: {wrong}."


def _check_run(run: Path) -> None:
    if not is_run(run):
        inner = sorted(folder.name for folder in run.glob("[0-9]*-*") if is_run(folder))
        stages = (
            f" The folder contains stages; give one of them: {', '.join(str(run / name) for name in inner)}."
            if inner
            else ""
        )
        raise no_run(run, stages)


def _usable(run: Path, folders: Sequence[Path], step: int) -> Path:
    """Return the newest usable checkpoint of a step. Raises CheckpointError if there is none."""
    faults = {folder: fault_of(folder) for folder in folders if step_of(folder) == step}
    usable = [folder for folder, fault in faults.items() if fault is None]
    if usable:
        return usable[-1]
    near = sorted((f for f in folders if f not in faults), key=lambda f: abs((step_of(f) or 0) - step))
    others = sorted({step_of(f) or 0 for f in islice((f for f in near if fault_of(f) is None), NEAREST)})
    why = " ".join(fault for fault in faults.values() if fault) or f"{run} has no checkpoint of step {step}."
    if not others:
        raise CheckpointError(f"{why} The run has no complete checkpoint.")
    whole = ", ".join(map(str, others))
    raise CheckpointError(f"{why} Set --to to a step with a complete checkpoint, the nearest: {whole}.")


def _after(table: Path, position: int) -> bytes:
    content = table.read_bytes() if position or table.exists() else b""
    if len(content) < position:
        raise RunDirectoryError(
            f"{table} has lost rows that its checkpoint counts ({position} bytes). Restore the file, or go back further."
        )
    return content[position:]


def _copy_aside(plan: RollbackPlan) -> None:
    """Copy all rows and episodes that will be removed, except those that a killed rollback has already copied."""
    for place in ("checkpoints", "stages", *FOLDERS):
        (plan.aside / place).mkdir(parents=True, exist_ok=True)
    for table in TABLES:
        rows = _after(plan.run / table, plan.positions.get(table, 0))
        if rows:
            replace_file(plan.aside / table, rows)
    for part in plan.episodes:
        kept = plan.aside / _aside_of(part).relative_to(plan.run)
        if kept.exists():
            continue
        if part.before is not None:
            replace_file(kept, part.after)
            continue
        try:
            os.link(part.file, kept)
        except OSError:  # the file system does not support hard links
            beside = kept.with_name(f".{kept.name}.partial")
            shutil.copyfile(part.file, beside)
            flush(beside)
            beside.replace(kept)
    for folder in FOLDERS:
        flush(plan.aside / folder)


def _aside_of(part: LaterRows) -> Path:
    """Return the path, relative to the run, of a file that holds only this part."""
    return part.file.with_name(part.name)


def _move(folder: Path, kept: Path) -> None:
    folder.rename(kept)
    flush(kept.parent)
    flush(folder.parent)
