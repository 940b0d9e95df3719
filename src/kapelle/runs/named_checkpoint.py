"""Finds the best checkpoint of a run, and checkpoints by name (`RUN`, `RUN@best` or `RUN@12`).

The best checkpoint is determined only from the files of the run, so that it is correct after a kill or a rollback. The
best checkpoint is the complete checkpoint of the step with the best value of a metric (the earliest step if several
values are equal). The value is taken from the last evaluation at the step, or from the training step if no evaluation
reports the metric.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kapelle.errors import CheckpointError, ConfigError, did_you_mean
from kapelle.models.outline import Outline, check_saved
from kapelle.runs.checkpoint_folder import is_whole, list_checkpoints, newest_listed
from kapelle.runs.reader import is_run, read_config, read_evaluations, read_latest, read_metrics
from kapelle.runtime.files import step_of
from kapelle.settings.overlays import parse_yaml
from kapelle.team import Team

BEST, NEWEST = "best", "latest"


def values_of(run: Path, metric: str) -> dict[int, float]:
    """Return the value of a metric at each step that has a value. Raises the errors of the reader for damaged rows.

    Examples of metric names are `success`, `reward/solver` and `success/PART`.
    """
    group, _, name = metric.partition("/")
    tables: tuple[Callable[[Path], Iterable[Mapping[str, Any]]], ...] = (read_evaluations, read_metrics)
    for read in tables:
        values: dict[int, float | None] = {}
        for row in read(run):
            inner, parts = row.get(group), row.get("parts")
            found = row.get(metric)
            if found is None and name and isinstance(inner, Mapping):
                found = inner.get(name)
            if found is None and group == "success" and isinstance(parts, Mapping):
                part = parts.get(name)
                found = part.get("success", part.get("value")) if isinstance(part, Mapping) else None
            # If a step has several rows, the last one counts.
            values[int(row["step"])] = (
                float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None
            )
        known = {step: value for step, value in values.items() if value is not None}
        if known:
            return known
    return {}


def best_checkpoint(run: Path, metric: str, *, lowest: bool) -> Path | None:
    """Return the best complete checkpoint, or None if no step with a checkpoint has a value of the metric."""
    values = values_of(run, metric)
    folders = [folder for folder in list_checkpoints(run / "checkpoints") if step_of(folder) in values]
    sign = 1.0 if lowest else -1.0
    for folder in sorted(folders, key=lambda each: (sign * values[step_of(each) or 0], step_of(each))):
        if is_whole(folder):
            return folder
    return None


def why_no_best(run: Path, metric: str) -> str:
    """Return the reason why a run has no best checkpoint by a metric, and suggest a similar metric name if there is one."""
    rows = [*read_metrics(run)[-1:], *read_evaluations(run)[-1:]]
    known = [
        name
        for row in rows
        for name, value in row.items()
        if isinstance(value, int | float) and name != "step"
    ]
    return (
        f"so far, no step with a checkpoint has the metric '{metric}' "
        f"(`checkpoint.best`).{did_you_mean(metric, known)}"
    )


def split_run(word: str) -> tuple[Path, str | None]:
    """Split `RUN@WHICH` into the run and the checkpoint, which is `best`, a step, or None for the newest checkpoint."""
    run, mark, which = word.rpartition("@")
    if not mark or not run or Path(word).exists():
        return Path(word), None
    if which not in (BEST, NEWEST) and not which.isdecimal():
        meant = next(iter(get_close_matches(which.lower(), (BEST, NEWEST), n=1)), "")
        hint = (
            f"Did you mean {run}@{meant}?"
            if meant
            else f"Write {run}@best, {run}@STEP, or {run} for the newest checkpoint."
        )
        raise ConfigError(f"'{word}' is not a checkpoint. {hint}")
    return Path(run), None if which == NEWEST else which


def named_checkpoint(run: Path, which: str | None) -> Path | None:
    """Return the checkpoint that the second result of `split_run` specifies, or None for the newest checkpoint.

    Raises ConfigError if the run does not keep a best checkpoint, and CheckpointError if the step has no complete
    checkpoint.
    """
    if which is None:
        return None
    if which == BEST:
        settings = parse_yaml(read_config(run))
        kept = settings.get("checkpoint") if isinstance(settings, dict) else None
        metric = kept.get("best") if isinstance(kept, dict) else None
        if not isinstance(kept, dict) or not isinstance(metric, str):
            raise ConfigError(
                f"{run} keeps no best checkpoint. Train with `checkpoint.best: success`, or specify a "
                f"step.{_nearest(run, 10**12)}"
            )
        found = best_checkpoint(run, metric, lowest=kept.get("best_is") == "lowest")
        if found is None:
            raise CheckpointError(
                f"No step of {run} with a checkpoint has the metric '{metric}'. Specify a "
                f"step.{_nearest(run, 10**12)}"
            )
        return found
    folders = [folder for folder in list_checkpoints(run / "checkpoints") if step_of(folder) == int(which)]
    whole = next((folder for folder in reversed(folders) if is_whole(folder)), None)
    if whole is None:
        raise CheckpointError(f"{run} has no complete checkpoint of step {which}.{_nearest(run, int(which))}")
    return whole


NEAREST = 3
"""The maximum number of checkpoints that are listed in a message."""


def _nearest(run: Path, step: int) -> str:
    """Return a sentence that lists the checkpoints of a run that are nearest to a step."""
    kept = sorted({step_of(folder) or 0 for folder in list_checkpoints(run / "checkpoints")})
    if not kept:
        return " The run has no checkpoint yet."
    near = sorted(sorted(kept, key=lambda each: abs(each - step))[:NEAREST])
    listed = ", ".join(f"{run}@{each}" for each in near)
    return (
        f" The run has {listed}."
        if len(near) == len(kept)
        else f" The nearest of its {len(kept)} checkpoints are {listed}."
    )


def resumed_run(word: str) -> Path:
    """Return the run that `kapelle train --resume` continues. Raises ConfigError if `word` is an older checkpoint."""
    run, which = split_run(word)
    if which is None or not is_run(run):
        return run if is_run(run) else Path(word)
    named, newest = named_checkpoint(run, which), newest_listed(run / "checkpoints")
    step = step_of(named) if named is not None else None
    if newest is not None and step == step_of(newest):
        return run
    raise ConfigError(
        f"A run resumes from its newest checkpoint, but '{word}' is an older one. Roll back first "
        f"(`kapelle runs rollback {shlex.quote(str(run))} --to {step}`), or start another run with "
        f"its weights (`kapelle train RECIPE --start-from {shlex.quote(word)}`)."
    )


# -------- Policies in a checkpoint, and whether saved weights fit a team. This part does not import torch, because a
# dry run must be quick.

_POLICIES = "policies"


def policy_folder(checkpoint: Path, policy: str) -> Path:
    """Return the folder of a trained policy in a checkpoint, in a format that other programs can load."""
    return checkpoint / _POLICIES / policy.replace(":", "_").replace("/", "_")


def names_a_run(source: str) -> bool:
    """Return whether a source of weights is a run, written as `RUN`, `RUN@best` or `RUN@STEP`."""
    return is_run(split_run(source)[0])


def weights_of(policy: str, source: str, setting: str) -> Path:
    """Return the folder with the weights of a policy. The argument `source` is a run, one of its checkpoints, an adapter or a model.

    In a checkpoint, the folder is that of the policy with the same name, or of the only policy. Raises ConfigError or
    CheckpointError, which name the `setting`, for a source without weights.
    """
    place, which = split_run(source)
    if is_run(place):
        checkpoint = named_checkpoint(place, which) or read_latest(place)
        if checkpoint is None:
            raise CheckpointError(
                f"`{setting}` is {place}, a run without a complete checkpoint. Train it first."
            )
        return _kept(policy, checkpoint, place, setting)
    if (place / _POLICIES).is_dir():
        return _kept(policy, place, place, setting)
    if (place / "adapter_config.json").is_file() or (place / "config.json").is_file():
        return place
    if not place.exists():
        raise ConfigError(
            f"`{setting}` is '{source}', but {place.absolute()} does not exist. Give a run (RUN, "
            "RUN@best, RUN@STEP), or the folder of a PEFT adapter or model."
        )
    raise ConfigError(
        f"`{setting}` is '{source}', which is not a run, checkpoint, PEFT adapter or model: it has no "
        "config.yaml, "
        f"{_POLICIES}/, adapter_config.json or config.json."
    )


def _kept(policy: str, checkpoint: Path, named: Path, setting: str) -> Path:
    own = policy_folder(checkpoint, policy)
    if own.is_dir():
        return own
    others = sorted(path for path in (checkpoint / _POLICIES).glob("*") if path.is_dir())
    if len(others) == 1:
        return others[0]
    names = ", ".join(path.name for path in others) or "none"
    raise ConfigError(
        f"`{setting}`: {named} has no weights for '{policy}', only for: {names}. Give the folder of "
        "one of these policies: "
        f"{checkpoint / _POLICIES}/NAME."
    )


def check_start(
    folders: Mapping[str, Path],
    team: Team,
    models: Mapping[str, Outline],
    verifiers: Mapping[str, str],
) -> None:
    """Check the folders of initial weights by policy and the folders of verifiers by critic, before a model is loaded.

    The argument `models` contains the outlines of the team's base models. Raises ConfigError or ModelError for the
    first problem.
    """
    for name, folder in folders.items():
        if name not in team.trained:
            raise ConfigError(
                f"`start_from` contains the policy '{name}', which this team does not train."
                f"{did_you_mean(name, team.trained)}"
            )
        policy = team.policies[name]
        check_saved(f"Policy '{name}'", folder, policy.lora, models[policy.base])
    for name, verifier in verifiers.items():
        critic = team.critics[name]
        check_saved("`algorithm.verifier`", Path(verifier), critic.lora, models[critic.base])


def check_verifier(folder: Path, least_auc: float) -> None:
    """Raise ConfigError unless the folder of a verifier records sufficient accuracy on held-out answers.

    The AUC within questions must be at least `least_auc`, and the 95 % interval of the AUC must be above ½. The module
    `training/held_out.py` explains the measurement, and why answers are compared within questions.
    """
    try:
        found = json.loads((folder / "verifier.json").read_text("utf-8"))["held_out"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        found = None
    if not found or "interval_within" not in found:
        raise ConfigError(
            f"The verifier '{folder}' has no record of its accuracy, but `algorithm.least_auc` requires "
            f"{least_auc:g}. Give the folder `verifier` in a checkpoint of a run, or set "
            "`algorithm.least_auc: null`."
        )
    about = (
        f"{found['answers']} answers to {found['questions']} held-out questions, {found['right']:.1%} "
        f"of them correct, and {found['both']} questions with both correct and incorrect answers; "
        f"`algorithm.least_auc` requires an AUC of {least_auc:g} and an interval above 0.5"
    )
    remedy = (
        "Train it for more steps or on more questions, start from a team that is correct more often (`warmup.steps`, "
        "another `model.path`), use the environment's reward (`algorithm.verifier: null`, `workflow.score_rounds: true`), "
        "or set `algorithm.least_auc: null` to start anyway."
    )
    if found["interval_within"] is None:
        raise ConfigError(
            f"The verifier '{folder}' cannot reward this team: too few questions have both correct and incorrect answers to "
            f"measure its accuracy: {about}. {remedy}"
        )
    low, high = found["interval_within"]
    if found["auc_within"] < least_auc or low <= 0.5:
        raise ConfigError(
            f"The verifier '{folder}' cannot reward this team: it separates correct from incorrect answers to one question with "
            f"an AUC of only {found['auc_within']:.3f} [{low:.3f}, {high:.3f}] (95 %; {found['auc']:.3f} over all answers), "
            f"measured on {about}. {remedy}"
        )
