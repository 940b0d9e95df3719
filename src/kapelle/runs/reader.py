"""Reads a run directory; the files are documented in `writer`."""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, get_args

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from kapelle.errors import DataError, RunDirectoryError, did_you_mean
from kapelle.runs.checkpoint_folder import newest_listed, newest_valid
from kapelle.runs.episode_json import load_episode, load_groups
from kapelle.runs.lock import has_ended, is_another_process
from kapelle.runs.recorded import as_lines, check_step, losses
from kapelle.runs.step_rows import (
    Stored,
    check_damage,
    last_step,
    lines_of,
    reading,
    stored_step,
    stored_steps,
)
from kapelle.runtime.files import plain_bytes, step_of
from kapelle.types import Episode, Group, Json, Split

if TYPE_CHECKING:
    from kapelle.settings.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Status:
    """The current activity of a run, or how the run ended."""

    state: State
    phase: str
    """The phase of the training loop, such as `rollout`, `update` or `evaluate`."""
    step: int
    pid: int
    host: str
    started: str
    """The time in UTC at which this process took over the run, in ISO 8601 format."""
    updated: str


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run, even if the file `lock` is missing."""
    known = ("lock", "metrics.jsonl")
    return (path / "config.yaml").is_file() and any((path / name).is_file() for name in known)


def episode_folder(run: Path, split: Split) -> Path:
    """Return the folder of the episode files of a split."""
    return run / "episodes" / split


def tag_hint(word: Path) -> str:
    """Return a hint if `RUN@STEP` or a folder inside a run was given in place of a run, or an empty string for other paths."""
    run, mark, which = str(word).rpartition("@")
    if mark and is_run(Path(run)):
        return (
            f" '@{which}' specifies one of its checkpoints; write {run} here, or begin a new run from the "
            f"checkpoint: `--start-from {word}`."
        )
    around = next((folder for folder in word.parents if is_run(folder)), None)
    if around is None:
        return ""
    kind, _, step = str(word.relative_to(around)).partition("/")
    number = step.partition("/")[0].lstrip("0")
    begin = f", or begin a new run from this checkpoint: `--start-from {around}@{number}`"
    return (
        f" It is inside the run {around}; write that path "
        f"here{begin if kind == 'checkpoints' and number.isdigit() else ''}."
    )


def no_run(path: Path, hint: str = "") -> RunDirectoryError:
    """Return the error for a path that is not a run. Without another hint, it names a run with a similar path."""
    beside: list[str] = []
    with suppress(OSError):
        beside = [str(each) for each in path.parent.iterdir() if is_run(each)]
    found = hint or tag_hint(path) or did_you_mean(str(path), beside)
    return RunDirectoryError(
        f"There is no kapelle run at {path}.{found or ' `kapelle runs ls FOLDER` lists the runs in a folder.'}"
    )


def read_config(run: Path) -> str:
    """Return the resolved config as a string. Raises RunDirectoryError if there is no run."""
    if not is_run(run):
        raise no_run(run)
    try:
        return _bytes(run / "config.yaml").decode()
    except UnicodeDecodeError as error:
        raise RunDirectoryError(
            f"{run / 'config.yaml'} is damaged: it is not UTF-8 text ({error.reason}). Restore it from a copy."
        ) from None


def read_provenance(run: Path) -> dict[str, Json]:
    """Return the source of each value in the config. Raises RunDirectoryError for a damaged or unreadable file."""
    path = run / "provenance.json"
    try:
        found = {str(key): value for key, value in json.loads(_bytes(path)).items()}
    except (ValueError, AttributeError, RecursionError):
        raise RunDirectoryError(f"{path} is damaged. Remove it: the run does not need it.") from None
    found.pop(STARTS, None)
    return found


def read_starts(run: Path) -> list[dict[str, Any]]:
    """Return a record of each start and resume, oldest first (see `training.provenance`), or an empty list if there is no record."""
    try:
        found = json.loads(plain_bytes(run / "provenance.json"))[STARTS]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    rows = found if isinstance(found, list) else []
    return [row for row in rows if isinstance(row, dict)]


def read_excluded(run: Path) -> list[str]:
    """Return messages about the number of tasks and rows that the last start excluded, and the reasons."""
    starts = read_starts(run)
    found = starts[-1].get("excluded") if starts else None
    return [line for line in found if isinstance(line, str)] if isinstance(found, list) else []


def planned_steps(run: Path, config: RunConfig) -> int:
    """Return the number of steps of a run, which is set in its settings or computed from `training.epochs`."""
    if config.training.epochs is None or not is_run(run):
        return config.training.steps
    from kapelle.settings.overlays import (
        parse_yaml,
    )  # imported here, because the rest of this module needs no YAML

    written = parse_yaml(read_config(run))
    return int(written["training"]["steps"])


def read_status(run: Path) -> Status:
    """Return the status of a run. The state is `killed` if its process on this host has ended without recording the reason.

    Raises RunDirectoryError for a damaged or unreadable file.
    """
    path = run / "status.json"
    try:
        status = Status(**json.loads(_bytes(path)))
        if not type(status.pid) is type(status.step) is int or status.state not in get_args(State):
            raise ValueError(path)
    except (ValueError, TypeError, RecursionError):
        raise RunDirectoryError(
            f"{path} is damaged. A resume rewrites it: `kapelle train --resume {shlex.quote(str(run))}`."
        ) from None
    is_here = status.state == "running" and status.host == socket.gethostname()
    if is_here and (has_ended(status.pid) or is_another_process(run / "lock", status.pid)):
        return replace(status, state="killed")
    return status


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Return the rows of all steps, each with its `step`, in the order of training. Raises DataError for a damaged row."""
    return list(_rows(run / "metrics.jsonl", metrics_fault))


def read_evaluations(run: Path) -> list[dict[str, Json]]:
    """Return the rows of all evaluations, each with its `step`. Raises DataError for a damaged row."""
    return list(_rows(run / "evaluations.jsonl", evaluation_fault))


def episode_steps(run: Path, split: Split = "train") -> list[int]:
    """Return the steps with complete episodes, in ascending order."""
    return list(stored_steps(episode_folder(run, split)))


def last_episode_step(run: Path, split: Split = "train") -> int:
    """Return the last step with recorded episodes, or -1 if there is no such step."""
    return last_step(episode_folder(run, split))


WHOLE = 1 << 30
"""The maximum number of bytes of a step's rows that are read at once."""


def read_groups(run: Path, step: int, split: Split = "train") -> list[Group]:
    """Return the groups of one step as they were recorded. Raises RunDirectoryError if there are none.

    Raises DataError for damaged episodes, and for a step of more than `WHOLE` bytes. For such a step, use
    `read_episodes`, which yields the episodes one by one.
    """
    stored = _stored(run, step, split)
    if stored.size > WHOLE:
        raise DataError(
            f"The {split} episodes of step {step} have {stored.size} bytes, more than the limit of "
            f"{WHOLE} ({stored.file}). Read them one by one: read_episodes(run, step)."
        )
    with _named(stored.file):
        return load_groups(_step_rows(stored), partial(read_image, run))


def _stored(run: Path, step: int, split: Split) -> Stored:
    """Return the location of the episodes of a step.

    Raises DataError if the episodes differ from the record, and RunDirectoryError if there are none.
    """
    stored = stored_step(episode_folder(run, split), step)
    check_step(run, f"episodes/{split}", step, stored)
    if stored is None:
        raise RunDirectoryError(f"{run} has no {split} episodes of step {step}.")
    return stored


def read_episodes(run: Path, step: int | None = None, split: Split = "train") -> Iterator[Episode]:
    """Yield the episodes of one step, or of all steps in order. Raises DataError for damaged episodes."""
    folder = episode_folder(run, split)
    if step is None:
        check_damage(folder)
        lost = as_lines(losses(run, f"episodes/{split}"))
        if lost:
            raise DataError(
                f"{run}: {'; '.join(lost)}. Restore them from a copy, or read the other steps one by one."
            )
        found = list(stored_steps(folder).values())
    else:
        found = [_stored(run, step, split)]
    for stored in found:
        for row in _step_rows(stored):
            with _named(stored.file):
                episode = load_episode(row, partial(read_image, run))
            yield episode


def read_lines(run: Path, step: int, lines: Collection[int], split: Split = "train") -> list[Group]:
    """Return the groups of a step, limited to the episodes on the given lines (counted from 0)."""
    stored = stored_step(episode_folder(run, split), step)
    if stored is None:
        raise RunDirectoryError(f"{run} has no {split} episodes of step {step}.")
    wanted = set(lines)
    with _named(stored.file):
        chosen = (json.loads(raw) for line, raw in enumerate(lines_of(stored)) if line in wanted)
        return load_groups(chosen, partial(read_image, run))


def read_image(run: Path, name: str) -> bytes:
    """Return the bytes of an image that occurs in prompts, or empty bytes if the file of the image is missing."""
    with suppress(FileNotFoundError):
        return (run / "images" / name).read_bytes()
    return b""


def read_latest(run: Path) -> Path | None:
    """Return the newest complete checkpoint, or None if there is none yet. The whole content of the checkpoint is read.

    The file `latest` is not used, because it is outdated if the run was killed after a save and before `latest` was
    updated.
    """
    return newest_valid(run / "checkpoints").folder


def saved_steps(run: Path) -> int:
    """Return the step of the newest checkpoint, or 0 if there is none yet. Only its manifest and the sizes of its files are checked."""
    newest = newest_listed(run / "checkpoints")
    return (None if newest is None else step_of(newest)) or 0


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Convert errors about the rows of a file inside the block to a DataError that names the file."""
    try:
        yield
    except (DataError, KeyError, TypeError, AttributeError) as error:
        if str(path) in str(error):
            raise
        reason = error if isinstance(error, DataError) else f"a row has an unknown format ({error!r})."
        raise DataError(f"{path} is damaged: {reason} Restore it from a copy.") from error


def _rows(path: Path, fault_of: Callable[[Mapping[str, Json]], str | None]) -> Iterator[dict[str, Any]]:
    # The text after the last newline is empty or part of a row that is being written.
    return _parsed(f"{path}, line", _bytes(path).split(b"\n")[:-1], fault_of)


def _step_rows(stored: Stored) -> Iterator[dict[str, Any]]:
    return _parsed(f"{stored.file}, step {stored.step}, row", lines_of(stored), lambda _: None)


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
            raise DataError(f"{where} {number} is damaged: {fault}. Remove that line to read the other rows.")
        yield row


def _bytes(path: Path) -> bytes:
    with reading(path):
        return plain_bytes(path)


# -------- Checks of rows of `metrics.jsonl` and `evaluations.jsonl`.
#
# Rows have no hash: a changed name or a value of the wrong type counts as damage; a changed digit cannot be detected.


def metrics_fault(row: Mapping[str, Json]) -> str | None:
    """Return what is wrong with the metrics of a step, or None if they are valid."""
    wrong = next((name for name, value in row.items() if not _is_number(value)), None)
    return _step_fault(row) or (None if wrong is None else f"{wrong!r} is not a number")


def evaluation_fault(row: Mapping[str, Json]) -> str | None:
    """Return what is wrong with the row of an evaluation, or None if it is valid."""
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


class _EvaluationRow(TypedDict):
    """The form of a row of `evaluations.jsonl`."""

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
    verifier: NotRequired[dict[str, Any] | None]
    games: NotRequired[bool]
    part_reward: NotRequired[dict[str, dict[str, float]]]


@cache
def _form_of_evaluations() -> TypeAdapter[_EvaluationRow]:
    return TypeAdapter(_EvaluationRow)


STARTS = "starts"
"""A key in `provenance.json` that is not a setting."""

State = Literal["running", "finished", "interrupted", "failed", "killed"]
