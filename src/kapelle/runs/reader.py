"""Reading a run directory back; `writer` documents its files."""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, get_args

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from kapelle.errors import DataError, RunDirectoryError
from kapelle.runs.checkpoint_folder import newest_listed, newest_valid
from kapelle.runs.episode_json import load_episode, load_groups
from kapelle.runs.lock import is_another_process
from kapelle.runs.recorded import in_words, losses, refuse_loss
from kapelle.runs.step_rows import (
    Stored,
    last_step,
    lines_of,
    reading,
    refuse_damage,
    stored_step,
    stored_steps,
)
from kapelle.runtime.files import plain_bytes, step_of
from kapelle.types import Episode, Group, Json, Split

if TYPE_CHECKING:
    from kapelle.settings.schema import RunConfig


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


def tag_hint(word: Path) -> str:
    """Return what to write in place of `RUN@STEP`, or a folder in a run, where a whole run is meant; empty for what names neither."""
    run, mark, which = str(word).rpartition("@")
    if mark and is_run(Path(run)):
        return f" '@{which}' names one of its checkpoints; write {run} here, or begin a new run from it: `--start-from {word}`."
    around = next((folder for folder in word.parents if is_run(folder)), None)
    if around is None:
        return ""
    kind, _, step = str(word.relative_to(around)).partition("/")
    number = step.partition("/")[0].lstrip("0")
    begin = f", or begin a new run from this checkpoint: `--start-from {around}@{number}`"
    return f" It lies in the run {around}; write that here{begin if kind == 'checkpoints' and number.isdigit() else ''}."


def read_config(run: Path) -> str:
    """Return the text of the resolved config; raises RunDirectoryError where there is no run."""
    if not is_run(run):
        raise RunDirectoryError(
            f"There is no run of kapelle at {run}.{tag_hint(run) or ' Name a folder that holds config.yaml and lock.'}"
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
    """Return the circumstances of each start and resume, oldest first (see `training.provenance`); empty without a record."""
    try:
        found = json.loads(plain_bytes(run / "provenance.json"))[STARTS]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    rows = found if isinstance(found, list) else []
    return [row for row in rows if isinstance(row, dict)]


def read_left_out(run: Path) -> list[str]:
    """Return how many tasks and rows the last start has left out, and why, a sentence each; empty where none are recorded."""
    starts = read_starts(run)
    found = starts[-1].get("left_out") if starts else None
    return [line for line in found if isinstance(line, str)] if isinstance(found, list) else []


def planned_steps(run: Path, config: RunConfig) -> int:
    """Return the steps that a run takes: those of its settings, or what it has made of `training.epochs` if it has begun."""
    if config.training.epochs is None or not is_run(run):
        return config.training.steps
    from kapelle.settings.overlays import (
        parse_yaml,  # reading anything else of a run needs the standard library alone
    )

    written = parse_yaml(read_config(run))
    return int(written["training"]["steps"])


def read_status(run: Path) -> Status:
    """Return what the run is doing; `interrupted` where its process on this host is gone.

    Raises RunDirectoryError when the file is damaged or cannot be read.
    """
    path = run / "status.json"
    try:
        status = Status(**json.loads(_bytes(path)))
        if not type(status.pid) is type(status.step) is int or status.state not in get_args(State):
            raise ValueError(path)
    except (ValueError, TypeError, RecursionError):
        raise RunDirectoryError(
            f"{path} is damaged. Resuming the run writes it anew: `kapelle train --resume {shlex.quote(str(run))}`."
        ) from None
    if status.state == "running" and status.host == socket.gethostname():
        gone = False
        try:
            os.kill(status.pid, 0)
        except (ProcessLookupError, OverflowError):
            gone = True
        except PermissionError:  # another user's
            pass
        if gone or is_another_process(run / "lock", status.pid):
            return replace(status, state="interrupted")
    return status


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Return the rows of all steps, each with its `step`, in the order of training; DataError for a damaged one."""
    return list(_rows(run / "metrics.jsonl", metrics_fault))


def read_evaluations(run: Path) -> list[dict[str, Json]]:
    """Return the rows of all evaluations, each with its `step`; DataError for a damaged one."""
    return list(_rows(run / "evaluations.jsonl", evaluation_fault))


def episode_steps(run: Path, split: Split = "train") -> list[int]:
    """Return the steps whose episodes are recorded and not damaged, in ascending order."""
    return list(stored_steps(episode_folder(run, split)))


def last_episode_step(run: Path, split: Split = "train") -> int:
    """Return the last step whose episodes are recorded, -1 for none."""
    return last_step(episode_folder(run, split))


WHOLE = 1 << 30
"""Bytes of a step's rows that are read at once."""


def read_groups(run: Path, step: int, split: Split = "train") -> list[Group]:
    """Return the groups of one step as they were recorded, all at once; raises RunDirectoryError if there are none.

    DataError for damage, and for a step of more than `WHOLE` bytes: `read_episodes` yields those one after another.
    """
    stored = stored_step(episode_folder(run, split), step)
    refuse_loss(run, f"episodes/{split}", step, stored)
    if stored is None:
        raise RunDirectoryError(f"{run} holds no {split} episodes of step {step}.")
    if stored.size > WHOLE:
        raise DataError(
            f"The {split} episodes of step {step} are {stored.size} bytes, more than {WHOLE} to hold at once ({stored.file}). Read "
            "them one after another: read_episodes(run, step)."
        )
    with _named(stored.file):
        return load_groups(_rows_of(stored), partial(read_image, run))


def read_episodes(run: Path, step: int | None = None, split: Split = "train") -> Iterator[Episode]:
    """Yield the episodes of one step, or of all steps in order; DataError where some are damaged."""
    folder = episode_folder(run, split)
    if step is None:
        refuse_damage(folder)
        lost = in_words(losses(run, f"episodes/{split}"))
        if lost:
            raise DataError(
                f"{run}: {'; '.join(lost)}. Restore them from a copy, or read the other steps one by one."
            )
        found = list(stored_steps(folder).values())
    else:
        one = stored_step(folder, step)
        refuse_loss(run, f"episodes/{split}", step, one)
        if one is None:
            raise RunDirectoryError(f"{run} holds no {split} episodes of step {step}.")
        found = [one]
    for stored in found:
        for row in _rows_of(stored):
            with _named(stored.file):
                episode = load_episode(row, partial(read_image, run))
            yield episode


def read_lines(run: Path, step: int, lines: Collection[int], split: Split = "train") -> list[Group]:
    """Return the groups of some episodes of a step, which are given by their lines, from 0; other episodes are left out."""
    stored = stored_step(episode_folder(run, split), step)
    if stored is None:
        raise RunDirectoryError(f"{run} holds no {split} episodes of step {step}.")
    wanted = set(lines)
    with _named(stored.file):
        chosen = (json.loads(raw) for line, raw in enumerate(lines_of(stored)) if line in wanted)
        return load_groups(chosen, partial(read_image, run))


def read_image(run: Path, name: str) -> bytes:
    """Return the file of an image that agents saw; empty where it is gone."""
    with suppress(FileNotFoundError):
        return (run / "images" / name).read_bytes()
    return b""


def read_latest(run: Path) -> Path | None:
    """Return the newest checkpoint that is whole, None before the first; every content is read for that.

    The file `latest` is not read: a run that was killed between a save and the next write of that file left an old one.
    """
    return newest_valid(run / "checkpoints").folder


def saved_steps(run: Path) -> int:
    """Return the step of the newest checkpoint, 0 before the first; checks only its manifest and the sizes of its files."""
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


def _rows(path: Path, fault_of: Callable[[Mapping[str, Json]], str | None]) -> Iterator[dict[str, Any]]:
    # After the last newline there is nothing, or half a row that is being written.
    return _parsed(f"{path}, line", _bytes(path).split(b"\n")[:-1], fault_of)


def _rows_of(stored: Stored) -> Iterator[dict[str, Any]]:
    where = f"step {stored.step}, row" if stored.frames else "line"
    return _parsed(f"{stored.file}, {where}", lines_of(stored), lambda _: None)


def _parsed(
    where: str, lines: Iterable[bytes], fault_of: Callable[[Mapping[str, Json]], str | None]
) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            fault = "it is not a mapping"
        except (ValueError, RecursionError) as error:
            row, fault = None, str(error)
        if isinstance(row, dict):
            fault = fault_of(row) or ""
        if fault or not isinstance(row, dict):
            raise DataError(f"{where} {number} is damaged: {fault}. Remove that line to read the others.")
        yield row


def _bytes(path: Path) -> bytes:
    with reading(path):
        return plain_bytes(path)


# -------- Rows: what a row of `metrics.jsonl` or `evaluations.jsonl` must hold; anything else counts as damage.
#
# Rows carry no hash: a changed digit goes unnoticed; a changed name or a value of the wrong type is reported.


def metrics_fault(row: Mapping[str, Json]) -> str | None:
    """Return what is wrong with the metrics of a step, in words; None when nothing is wrong."""
    odd = next((name for name, value in row.items() if not _is_number(value)), None)
    return _step_fault(row) or (None if odd is None else f"{odd!r} is not a number")


def evaluation_fault(row: Mapping[str, Json]) -> str | None:
    """Return what is wrong with an evaluation's row, in words; None when nothing is wrong."""
    try:
        _form_of_evaluations().validate_python(row, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = str(first["loc"][0])
        return f"it has no {name!r}" if first["type"] == "missing" else f"{name!r}: {first['msg']}"
    return None


def _step_fault(row: Mapping[str, Json]) -> str | None:
    if "step" not in row:
        return "it has no 'step'"
    return None if _is_count(row["step"]) else "'step' is not a whole number of steps"


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


Count = Annotated[int, Field(ge=0)]
Ends = Annotated[list[float], Field(min_length=2, max_length=2)] | None


class _Judgement(TypedDict):
    """How well a verifier judges."""

    auc_within: float | None
    interval_within: Ends


def _whole(found: _Judgement) -> _Judgement:
    if found["auc_within"] is None and found["interval_within"] is not None:
        raise ValueError("an interval around no AUC")
    return found


class _EvaluationRow(TypedDict):
    """A row of `evaluations.jsonl`; what is required stands in rows of every version."""

    step: Count
    problems: Count
    success: float | None
    interval: Ends
    reward: dict[str, float]
    tokens: NotRequired[float]
    scored: NotRequired[Count | None]
    failed: NotRequired[Count]
    reason: NotRequired[str]
    fewer: NotRequired[str]
    parts: NotRequired[dict[str, dict[str, Any]]]
    verifier: NotRequired[Annotated[_Judgement, AfterValidator(_whole)] | None]
    games: NotRequired[bool]
    part_reward: NotRequired[dict[str, dict[str, float]]]


@cache
def _form_of_evaluations() -> TypeAdapter[_EvaluationRow]:
    return TypeAdapter(_EvaluationRow)


STARTS = "starts"
"""Key of `provenance.json` in addition to those of the settings."""

State = Literal["running", "finished", "interrupted", "failed"]
