"""Summarises a run from its folder alone, with its settings, progress and failures. This module does not need torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from kapelle.errors import CheckpointError, KapelleError, RunDirectoryError
from kapelle.runs.checkpoint_folder import list_checkpoints, verify
from kapelle.runs.definitions import has_rated_feature, none_scored, progress_metrics
from kapelle.runs.failure import Failure, first_errors, read_failure
from kapelle.runs.pace import Pace, pace_of
from kapelle.runs.reader import (
    is_run,
    read_config,
    read_evaluations,
    read_groups,
    read_metrics,
    read_provenance,
    read_status,
)
from kapelle.runs.recorded import FOLDERS, all_losses
from kapelle.runs.step_rows import damaged
from kapelle.runs.verdict import Verdict, judge
from kapelle.runtime.files import step_of
from kapelle.settings.overlays import parse_yaml

SHOWN = (
    "success",
    "scored",
    "samples",
    "failed_episodes",
    "return",
    *progress_metrics(),
    "reward_function",
    "nll",
    "preference_margin",
    "preference_accuracy",
    "verifier_auc",
    "loss",
    "mixer_loss",
    "entropy",
    "parity/max",
)
"""The most informative metrics, given by their name or by the part of their name before the slash."""
_COUNTS = ("scored", "samples", "failed_episodes")
"""The metrics that count the episodes in the mean success. These counts are shown if some episodes are not included in the mean."""

TROUBLES = (
    ("failed_episodes", "steps had failed episodes"),
    ("skipped/", "steps had an update that was skipped"),
    ("undone/", "steps had an update that was undone"),
    ("mixer_undone", "steps had a mixer fit that was undone"),
    (
        "parity/rounded",
        "steps had tokens for which trainer and sampler differed by rounding alone (harmless if there are few)",
    ),
)
"""The metrics that are 0 in a normal step, given by their name or a prefix of it, and the meaning of any other value."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A summary of a run."""

    path: Path
    state: str
    """The state of the run, which is a `reader.State`, or `damaged` if the folder cannot be read."""
    recipe: str
    algorithm: str
    step: int
    steps: int
    metrics: Mapping[str, float]
    """Some metrics of the last step."""
    size: int
    """The total size of all files in bytes."""
    wrong: str | None = None
    """The reason why the run cannot be read, or None if it can be read."""
    verdict: Verdict | None = None
    """The verdict on the health of the run, or None if the run cannot be read."""
    failure: Failure | None = None
    """The reason why the run failed or was killed."""

    def row(self) -> dict[str, Any]:
        """Return the summary as plain JSON values."""
        fields = ("state", "recipe", "algorithm", "step", "steps", "metrics", "size", "wrong")
        return {
            "path": str(self.path),
            **{name: getattr(self, name) for name in fields},
            "verdict": None if self.verdict is None else self.verdict.row(),
            "failure": None if self.failure is None else self.failure.row(),
        }


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint of a run."""

    folder: Path
    step: int
    size: int
    wrong: str | None
    """The reason why the checkpoint is damaged, or None if all of its files are unchanged."""


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield every run in or below a folder, in the order of names. Folders inside runs are not searched."""
    for place, inner, _ in os.walk(folder):
        if is_run(Path(place)):
            inner.clear()
            yield Path(place)
        inner.sort()


def summarise(run: Path) -> RunSummary:
    """Return the summary of a run. If the run cannot be read, the summary contains the reason."""
    size = size_of(run)
    try:
        config, status = settings_of(run), read_status(run)
        rows = read_metrics(run)
        return RunSummary(
            run,
            status.state,
            str(config["name"]),
            str(config["algorithm"]["name"]),
            status.step,
            int(config["training"]["steps"]),
            {} if not rows else telling(rows[-1]),
            size,
            verdict=judged(rows, config, read_evaluations(run)),
            failure=read_failure(run),
        )
    except (KapelleError, OSError, ValueError, TypeError, KeyError) as error:
        wrong = str(error) if isinstance(error, KapelleError) else f"{type(error).__name__}: {error}"
        return RunSummary(run, "damaged", "?", "?", 0, 0, {}, size, " ".join(wrong.split()))


def verdict_of(run: Path) -> Verdict | None:
    """Return the verdict on a run (such as healthy, flat or diverging), or None if the run cannot be read."""
    try:
        return judged(read_metrics(run), settings_of(run), read_evaluations(run))
    except (KapelleError, OSError, ValueError, TypeError, KeyError):
        return None


def pace_at(run: Path) -> Pace | None:
    """Return how the time of the last steps is divided into phases, or None if the run cannot be read or has too few steps."""
    try:
        return pace_of(_columns(read_metrics(run)), settings_of(run))
    except (KapelleError, OSError, ValueError, TypeError, KeyError):
        return None


def judged(
    rows: Sequence[Mapping[str, float]],
    settings: Mapping[str, Any],
    evaluations: Sequence[Mapping[str, Any]] = (),
) -> Verdict:
    """Return the verdict on a run with the given settings, based on the metrics of its steps. Each row contains its `step`."""
    columns = _columns(rows)
    return judge(
        [row["step"] for row in rows],
        columns,
        evaluations,
        opposed=opposed(settings, rows[-1] if rows else {}, columns),
    )


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    return {name: [_number(row.get(name)) for row in rows] for name in names}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and isfinite(value) else None


def opposed(settings: Mapping[str, Any], last: Mapping[str, float], names: Iterable[str]) -> bool:
    """Return whether some agents of the run win what other agents lose, so that their mean return does not show progress.

    The return of a single agent against the players of the environment shows its strength, whereas the return of an
    agent that plays all roles does not.
    """
    names = list(names)
    agents = {
        name.partition("/")[2]
        for name in names
        if name.startswith(("return/", "reward/")) and name.count("/") == 1
    }
    environment = settings.get("environment")
    has_opponents = isinstance(environment, Mapping) and bool(environment.get("opponents"))
    return (len(agents) > 1 or not has_opponents) and plays_against(settings, last, names)


def plays_against(settings: Mapping[str, Any], last: Mapping[str, float], names: Iterable[str] = ()) -> bool:
    """Return whether agents play against each other, according to the settings, the metrics of the last step, or the names of metrics."""

    def at(found: Any, name: str) -> Any:
        return found.get(name) if isinstance(found, Mapping) else None

    if has_rated_feature(settings):
        return True
    parts = at(at(settings, "environment"), "parts")
    rows = [at(part, "environment") for part in parts.values()] if isinstance(parts, Mapping) else []
    environments = [each for each in (at(settings, "environment"), *rows) if isinstance(each, Mapping)]
    if any(each.get("opponents") or each.get("reward") == "zero_sum" for each in environments):
        return True
    if rows:  # a mixture has one number for all its parts
        return any(each.get("name") == "openspiel" for each in environments)
    # Zero-sum OpenSpiel games report these numbers, except in steps in which all episodes failed.
    if any(name.startswith("info/won/") or name == "info/draw" for name in (*last, *names)):
        return True
    # Returns include rewards between turns, such as penalties for invalid moves, which need not sum to 0.
    kinds = [
        [value for name, value in last.items() if name.startswith(kind)] for kind in ("return/", "reward/")
    ]
    return any(len(values) > 1 and abs(sum(values)) < 1e-6 < max(map(abs, values)) for values in kinds)


def settings_of(run: Path) -> dict[str, Any]:
    """Return the settings of a run as nested values."""
    text = read_config(run)
    try:
        config = parse_yaml(text)
    except ValueError as error:
        raise RunDirectoryError(
            f"{run / 'config.yaml'} is damaged: {error}. Restore it from a copy."
        ) from None
    if not isinstance(config, dict):
        raise TypeError("config.yaml contains no settings")
    return config


def telling(row: Mapping[str, float]) -> dict[str, float]:
    """Return the most informative metrics of a row, in the order of `SHOWN`.

    `scored` counts episodes with a success. It is left out if success is undefined, as in games, where the returns are the result.
    """
    all_scored = row.get("scored", 0.0) == row.get("samples", 0.0) and not row.get("failed_episodes")
    hidden = _COUNTS if all_scored else () if "success" in row or none_scored(row) else ("scored",)
    return {
        name: value
        for shown in SHOWN
        for name, value in row.items()
        if name not in hidden
        if name == shown or (name.startswith(f"{shown}/") and shown not in (*_COUNTS, "parity/max"))
    }


def in_words(row: Mapping[str, float], most: int | None = None) -> str:
    """Return at most `most` of the metrics chosen by `telling` on one line.

    If some episodes are not included in the means, the counts of episodes are added.
    """
    parts = [f"{name} {value:.4g}" for name, value in row.items() if name not in _COUNTS][:most]
    if "samples" in row:
        failed = round(row.get("failed_episodes", 0.0) * row["samples"])
        counts = f"scored {row['scored']:.0f} of {row['samples']:.0f}" if "scored" in row else ""
        lost = f"{failed} of {row['samples']:.0f} episodes failed" if failed else ""
        parts.insert(1 if counts else 0, ", ".join(part for part in (counts, lost) if part))
    return "  ".join(part for part in parts if part)


def own_settings(run: Path) -> dict[str, tuple[Any, str]]:
    """Return every setting that differs from its default, with its source. The result is empty if the run has no record of sources."""
    settings = settings_of(run)
    values = flat(settings)
    for key, value in _lists(
        settings
    ):  # the source of a list such as `optimizer.betas` is recorded for the whole list
        values.setdefault(key, value)
    origin = read_provenance(run)
    return {
        key: (values.get(key), str(source)) for key, source in sorted(origin.items()) if source != "default"
    }


def _lists(value: Any, at: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the lists within nested settings, with their dotted names."""
    if isinstance(value, list) and value:
        yield at, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _lists(item, f"{at}.{key}" if at else str(key))


def kept_checkpoints(run: Path) -> list[Kept]:
    """Return the checkpoints of a run, oldest first. The whole content of the checkpoints is read."""

    def fault(folder: Path) -> str | None:
        try:
            verify(folder)
        except CheckpointError as error:
            return str(error)
        return None

    folders = list_checkpoints(run / "checkpoints")
    return [Kept(folder, step_of(folder) or 0, size_of(folder), fault(folder)) for folder in folders]


def failures(run: Path) -> list[str]:
    """Return messages about problems that occurred during training."""
    status, rows = read_status(run), read_metrics(run)
    lines = (
        [f"{status.state} in phase '{status.phase}' at step {status.step}"]
        if status.state != "finished"
        else []
    )
    lines += troubles([row["step"] for row in rows], _columns(rows))
    if status.state in ("running", "finished"):  # `Failure.lines` contains the errors of a failed run
        lines += _last_errors(run, rows)
    torn = [f"{folder}/{name} is damaged" for folder in FOLDERS for name in damaged(run / folder)]
    return [*lines, *torn, *all_losses(run, contents=True)]


def _last_errors(run: Path, rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the errors of the last training step in which episodes failed."""
    at = next((int(row["step"]) for row in reversed(rows) if row.get("failed_episodes")), 0)
    try:
        found = first_errors(read_groups(run, at), at) if at else ()
    except KapelleError:  # `all_losses` reports damaged episodes
        found = ()
    return [each.line() for each in found]


def troubles(steps: Sequence[float], columns: Mapping[str, Sequence[float | None]]) -> list[str]:
    """Return messages about how many steps had each of the problems in `TROUBLES`.

    The columns contain a value or None for each of `steps`.
    """
    lines = []
    for name, description in TROUBLES:
        own = [
            column
            for key, column in columns.items()
            if key == name or (name[-1] == "/" and key.startswith(name))
        ]
        bad = [step for k, step in enumerate(steps) if any((column[k] or 0) > 0 for column in own)]
        if bad:
            lines.append(f"{len(bad)} of {len(steps)} {description}, the last at step {bad[-1]:.0f}")
    return lines


def last_evaluation(run: Path) -> dict[str, Any] | None:
    """Return the row of the last evaluation, without its parts."""
    rows = read_evaluations(run)
    return {k: v for k, v in rows[-1].items() if k == "reward" or not isinstance(v, dict)} if rows else None


def size_of(folder: Path) -> int:
    """Return the total size in bytes of all files below a folder. A file that disappears in the meantime counts as 0."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(place) / name).lstat().st_size
            except OSError:
                continue
    return total


def flat(value: Any, at: str = "") -> dict[str, Any]:
    """Return nested settings as a flat mapping with dotted names."""
    if isinstance(value, dict) and value:
        pairs: Sequence[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list) and value:
        pairs = list(enumerate(value))
    else:
        return {at: value}
    return {k: v for key, item in pairs for k, v in flat(item, f"{at}.{key}" if at else str(key)).items()}
