"""Where a checkpoint keeps policies, and whether saved weights fit a team; no torch, so that a dry run answers at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kapelle.errors import CheckpointError, ConfigError, did_you_mean
from kapelle.models.outline import Outline, check_saved
from kapelle.runs.best import named_checkpoint, split_run
from kapelle.runs.reader import is_run, read_latest
from kapelle.team import VERIFIER, Team

_POLICIES = "policies"


def policy_folder(checkpoint: Path, policy: str) -> Path:
    """Return where a checkpoint keeps a trained policy in the form that other programs load."""
    return checkpoint / _POLICIES / policy.replace(":", "_").replace("/", "_")


def names_a_run(source: str) -> bool:
    """Return whether weights are named by a run: `RUN`, `RUN@best`, `RUN@STEP`."""
    return is_run(split_run(source)[0])


def weights_of(policy: str, source: str, setting: str) -> Path:
    """Return the folder of a policy's weights that `source` names: a run or one of its checkpoints, an adapter, a model.

    A checkpoint gives the policy's own weights, or those of its only policy. Raises ConfigError and CheckpointError, which
    name the `setting`, for a source without any.
    """
    place, which = split_run(source)
    if is_run(place):
        checkpoint = named_checkpoint(place, which) or read_latest(place)
        if checkpoint is None:
            raise CheckpointError(
                f"`{setting}` names {place}, which has no whole checkpoint. Train it first."
            )
        return _kept(policy, checkpoint, place, setting)
    if (place / _POLICIES).is_dir():
        return _kept(policy, place, place, setting)
    if (place / "adapter_config.json").is_file() or (place / "config.json").is_file():
        return place
    if not place.exists():
        raise ConfigError(
            f"`{setting}` names '{source}', but there is no {place.absolute()}. Name a run (RUN, RUN@best, RUN@STEP), a PEFT "
            "folder or a model's."
        )
    raise ConfigError(
        f"`{setting}` names '{source}', which is no run, checkpoint, PEFT adapter or model: it has no config.yaml, "
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
        f"`{setting}`: {named} has no weights of '{policy}'; it has those of: {names}. Name the folder of one: "
        f"{checkpoint / _POLICIES}/NAME."
    )


def check_start(
    folders: Mapping[str, Path], team: Team, models: Mapping[str, Outline], verifier: str | None
) -> None:
    """Check the folders that policies start from, and a verifier's folder, before a model is loaded.

    `models` are the outlines of the team's bases. Raises ConfigError or ModelError for the first fault.
    """
    for name, folder in folders.items():
        if name not in team.trained:
            raise ConfigError(
                f"`start_from` names the policy '{name}', which this team does not train."
                f"{did_you_mean(name, team.trained)}"
            )
        policy = team.policies[name]
        check_saved(f"Policy '{name}'", folder, policy.lora, models[policy.base])
    if verifier is not None:
        critic = team.critics[VERIFIER]
        check_saved("`algorithm.verifier`", Path(verifier), critic.lora, models[critic.base])


def check_verifier(folder: Path, least_auc: float) -> None:
    """Raise ConfigError unless a verifier's folder records that it judges held-out answers this well.

    Required is an AUC of `least_auc` among answers to one question, whose 95 % interval lies above ½.
    `training/held_out.py` explains how it is measured, and why not over all answers.
    """
    try:
        found = json.loads((folder / "verifier.json").read_text("utf-8"))["held_out"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        found = None
    if found is None:
        raise ConfigError(
            f"There is no record of how well the verifier '{folder}' judges, but `algorithm.least_auc` asks for "
            f"{least_auc:g}. Name the folder `verifier` in a checkpoint of a run, which measures it, or set "
            "`algorithm.least_auc: null`."
        )
    about = (
        f"{found['answers']} answers to {found['questions']} held-out questions, {found['right']:.1%} of them right and "
        f"{found['both']} questions with both kinds; `algorithm.least_auc` asks for {least_auc:g} and an interval above 0.5"
    )
    remedy = (
        "Train it for more steps or on more questions, start from a team that is right more often (`warmup.steps`, "
        "another `model.path`), or let the environment pay (`algorithm.verifier: null`, `workflow.score_rounds: true`). "
        "With `algorithm.least_auc: null` the run starts all the same."
    )
    if found["interval_within"] is None:
        raise ConfigError(
            f"The verifier '{folder}' is to pay this team, but too few questions have both right and wrong answers to "
            f"measure how well it judges: {about}. {remedy}"
        )
    low, high = found["interval_within"]
    if found["auc_within"] < least_auc or low <= 0.5:
        raise ConfigError(
            f"The verifier '{folder}' is to pay this team, but it separates right from wrong answers to one question with "
            f"an AUC of only {found['auc_within']:.3f} [{low:.3f}, {high:.3f}] (95 %; {found['auc']:.3f} over all answers), "
            f"measured on {about}. {remedy}"
        )
