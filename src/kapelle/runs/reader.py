"""Reading a run directory back; `writer` documents its files."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from kapelle.errors import DataError, RunDirectoryError
from kapelle.runs.checkpoint_folder import newest_listed, newest_valid
from kapelle.runs.episode_json import load_episode, load_groups
from kapelle.runs.lock import is_another_process
from kapelle.runs.row_forms import evaluation_fault, metrics_fault
from kapelle.runtime.manifest import step_of
from kapelle.types import Episode, Group, Json, Split

_STEP = re.compile(r"[0-9]+")

STARTS = "starts"
"""Key of `provenance.json` in addition to those of the settings."""

State = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class Status:
    """What a run is doing, or how it ended."""

    state: State
    phase: str
    """What the loop is doing: `rollout`, `update`, `evaluate`, …"""
    step: int
    pid: int
    host: str
    started: str
    """When this process took over the run, ISO 8601 in UTC."""
    updated: str


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run, even one whose file `lock` was removed."""
    known = ("lock", "metrics.jsonl")
    return (path / "config.yaml").is_file() and any((path / name).is_file() for name in known)


def episode_folder(run: Path, split: Split) -> Path:
    """Return the folder of the episode files of a split."""
    return run / "episodes" / split


def episode_file(run: Path, step: int, split: Split) -> Path:
    """Return the file with the episodes of a step."""
    return episode_folder(run, split) / f"{step:08d}.jsonl"


def read_config(run: Path) -> str:
    """Return the text of the resolved config; raises RunDirectoryError where there is no run."""
    if not is_run(run):
        raise RunDirectoryError(
            f"There is no run of kapelle at {run}. Name a folder that holds config.yaml and lock."
        )
    try:
        return _bytes(run / "config.yaml").decode()
    except UnicodeDecodeError as error:
        raise RunDirectoryError(
            f"{run / 'config.yaml'} is damaged: it is not UTF-8 text ({error.reason}). Restore it from a copy."
        ) from None


def read_provenance(run: Path) -> dict[str, Json]:
    """Return where each value of the config came from; RunDirectoryError when the file is damaged or cannot be read."""
    path = run / "provenance.json"
    try:
        found = {str(key): value for key, value in json.loads(_bytes(path)).items()}
    except (ValueError, AttributeError, RecursionError):
        raise RunDirectoryError(
            f"{path} is damaged. It only records where settings came from: remove it, and the run continues without it."
        ) from None
    found.pop(STARTS, None)
    return found


def read_starts(run: Path) -> list[dict[str, Any]]:
    """Return the circumstances of each start and resume, oldest first (see `circumstances`); empty without a record."""
    try:
        found = json.loads((run / "provenance.json").read_bytes())[STARTS]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    rows = found if isinstance(found, list) else []
    return [row for row in rows if isinstance(row, dict)]


def read_status(run: Path) -> Status:
    """Return what the run is doing; `interrupted` where its process on this host is gone.

    Raises RunDirectoryError when the file is damaged or cannot be read.
    """
    status = _status(run / "status.json")
    if status.state == "running" and status.host == socket.gethostname():
        gone = not _alive(status.pid) or is_another_process(run / "lock", status.pid)
        return replace(status, state="interrupted") if gone else status
    return status


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Return the rows of all steps, each with its `step`, in the order of training; DataError for a damaged one."""
    return list(_rows(run / "metrics.jsonl", metrics_fault))


def read_evaluations(run: Path) -> list[dict[str, Json]]:
    """Return the rows of all evaluations, each with its `step`; DataError for a damaged one."""
    return list(_rows(run / "evaluations.jsonl", evaluation_fault))


def episode_steps(run: Path, split: Split = "train") -> list[int]:
    """Return the steps whose episodes are recorded, in ascending order."""
    files = episode_folder(run, split).glob("[0-9]*.jsonl")
    return sorted(int(file.stem) for file in files if _STEP.fullmatch(file.stem))


def read_groups(run: Path, step: int, split: Split = "train") -> list[Group]:
    """Return the groups of one step as they were recorded; raises RunDirectoryError if there are none."""
    path = episode_file(run, step, split)
    if not path.exists():
        raise RunDirectoryError(f"{run} holds no {split} episodes of step {step}.")
    with _named(path):
        return load_groups(_rows(path))


def read_episodes(run: Path, step: int | None = None, split: Split = "train") -> Iterator[Episode]:
    """Yield the episodes of one step, or of all steps in order."""
    for number in episode_steps(run, split) if step is None else [step]:
        path = episode_file(run, number, split)
        for row in _rows(path):
            with _named(path):
                episode = load_episode(row)
            yield episode


def read_latest(run: Path) -> Path | None:
    """Return the newest checkpoint that is whole, None before the first; every content is read for that.

    What the file `latest` says is not asked: a run killed between a save and its writing left it behind.
    """
    return newest_valid(run / "checkpoints").folder


def saved_steps(run: Path) -> int:
    """Return the steps behind the newest checkpoint, 0 before the first; only its manifest and sizes are looked at."""
    newest = newest_listed(run / "checkpoints")
    return (None if newest is None else step_of(newest)) or 0


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in errors about its rows."""
    try:
        yield
    except (DataError, KeyError, TypeError, AttributeError) as error:
        if str(path) in str(error):
            raise
        reason = error if isinstance(error, DataError) else f"a row has another form ({error!r})."
        raise DataError(f"{path} is damaged: {reason} Restore it from a copy.") from error


def _rows(
    path: Path, fault_of: Callable[[Mapping[str, Json]], str | None] = lambda _: None
) -> Iterator[dict[str, Any]]:
    lines = _bytes(path).split(b"\n")
    # What follows the last newline is empty, or half a row that is being written.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            fault = "it is not a mapping"
        except (ValueError, RecursionError) as error:
            row, fault = None, str(error)
        if isinstance(row, dict):
            fault = fault_of(row) or ""
        if fault or not isinstance(row, dict):
            raise DataError(
                f"{path}, line {number} is damaged: {fault}. Remove that line to read the others."
            )
        yield row


def _status(path: Path) -> Status:
    try:
        status = Status(**json.loads(_bytes(path)))
    except (ValueError, TypeError, RecursionError):
        status = None
    known = status is not None and type(status.pid) is type(status.step) is int
    if status is None or not known or status.state not in get_args(State):
        raise RunDirectoryError(
            f"{path} is damaged. Resuming the run writes it anew: kapelle train --resume {path.parent}."
        )
    return status


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunDirectoryError(
            f"Cannot read {path}: {error.strerror}. Is it a run directory that this user may read, on a disk without "
            "faults?"
        ) from error


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    except OverflowError:
        return False
    return True
