"""Load the team or the verifier of a run from a checkpoint, for use or export without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kapelle.engines.rollout.protocol import notes_of
from kapelle.engines.train.protocol import TrainEngine
from kapelle.errors import CheckpointError, ConfigError
from kapelle.models.checksums import CHECKSUMS
from kapelle.models.language_model import LanguageModel
from kapelle.rollout.setup import RolloutSetup, make_rollout_setup
from kapelle.runs.checkpoint_contents import load_verifier
from kapelle.runs.checkpoint_folder import newest_valid
from kapelle.runs.named_checkpoint import named_checkpoint, policy_folder
from kapelle.runtime.files import sha256, step_of
from kapelle.settings.feature import without_features
from kapelle.settings.schema import RunConfig
from kapelle.setup.feature import bases_of
from kapelle.setup.model_loading import build_engine, build_train_engine, load_weights
from kapelle.setup.preparation import PreparedRun, prepare
from kapelle.setup.team_file import is_team, read_team
from kapelle.team import VERIFIER
from kapelle.training.observer import Observer
from kapelle.training.provenance import config_of_run
from kapelle.types import Json


def checkpoint_of(run: Path, which: str | None, observer: Observer) -> tuple[Path, int]:
    """Return a checkpoint of a run and its step: the checkpoint `which` (see `runs.named_checkpoint`), or the newest intact checkpoint.

    Raises CheckpointError if there is no intact checkpoint. Damaged checkpoints are reported to the observer.
    """
    named = named_checkpoint(run, which)
    if named is None:
        newest = newest_valid(run / "checkpoints")
        for rejected in newest.rejected:
            observer.phase("checkpoint", f"skipped: {rejected.reason}")
        named = newest.folder
    if named is None:
        raise CheckpointError(
            f"There is no complete checkpoint in {run / 'checkpoints'}. Train the run first."
        )
    return named, step_of(named) or 0


def warmed(prepared: PreparedRun, observer: Observer) -> PreparedRun:
    """Return the prepared run with the base models on which the run was trained."""
    held: dict[str, LanguageModel] = {}
    bases = bases_of(prepared.config, prepared.team, observer.warmup, observer.phase, held)
    return prepared.on_bases(bases, held)


@dataclass(frozen=True, slots=True)
class Served:
    """A team whose weights are in memory, without an optimiser."""

    config: RunConfig
    setup: RolloutSetup
    step: int
    """The number of steps for which the weights were trained."""


def open_served(
    run: Path, observer: Observer, settings: Sequence[str] = (), which: str | None = None
) -> Served:
    """Load the team from a checkpoint of a run (see `checkpoint_of`), or from a folder that `kapelle export` wrote.

    The folder is only read. Missing data of the environment and missing reward functions are reported to `observer`. Raises
    CheckpointError if there is no checkpoint, and ConfigError or other errors if the settings are invalid.
    """
    absent: list[str] = []
    if is_team(run):
        if which is not None:
            raise ConfigError(f"{run} is an exported team, which has one checkpoint. Remove `@{which}`.")
        exported = read_team(run, settings)
        config, step, trained = exported.config, exported.step, exported.adapters
        ready = prepare(config, training=False, absent=absent)
    else:
        config = without_features(config_of_run(run, settings))
        prepared = prepare(config, training=False, absent=absent)
        checkpoint, step = checkpoint_of(run, which, observer)
        ready = warmed(prepared, observer)
        trained = {name: policy_folder(checkpoint, name) for name in ready.team.trained}
    for what in absent:
        observer.phase("missing", what)
    team = ready.team
    observer.phase("loading", ", ".join(dict.fromkeys(team.bases.values())))
    models = ready.load()
    weights = load_weights(team, models, trained, config.seed)
    engine = build_engine(config, models, team)
    for name in trained:
        engine.load(name, weights(name), step)
    for name in (each.name for each in team.policies.values() if each.past):
        engine.load(name, weights(name), 0)
    for note in notes_of(engine):
        observer.phase("engine", note)
    return Served(config, make_rollout_setup(config, team, engine), step)


def open_verifier(
    run: Path, observer: Observer, name: str | None = None
) -> tuple[TrainEngine, dict[str, Json]]:
    """Load the verifier from the newest intact checkpoint of a run. The run directory is only read.

    Returns an engine that scores with the verifier, and a description of the verifier. Raises ConfigError if the run does not
    train a verifier, CheckpointError if there is no checkpoint, and other errors if the settings are invalid.
    """
    config = config_of_run(run)
    prepared = prepare(config, training=False)
    critic = prepared.team.critics.get(VERIFIER)
    if critic is None or not critic.trained:
        raise ConfigError(
            f"{run} does not train a verifier (`algorithm.name: {prepared.algorithm.name}`). Give a run of `algorithm.name: verifier`, "
            "or for a run in stages the folder of the stage, such as RUN/01-judge."
        )
    folder, step = checkpoint_of(run, None, observer)
    ready = warmed(prepared, observer)
    observer.phase("loading", ", ".join(dict.fromkeys(ready.team.bases.values())))
    models = ready.load()
    engine = build_train_engine(config, prepared.algorithm, ready.team, models)
    load_verifier(folder / "verifier", critic, models, engine)
    kept = json.loads((folder / "verifier" / "verifier.json").read_text("utf-8"))
    about = {
        "name": name or config.name,
        "kind": "verifier",
        "step": step,
        "weights": sha256(folder / "verifier" / CHECKSUMS),
        "base": kept["base"],
        "held_out": kept["held_out"],
        "sources": dict(config.environment.sources),
    }
    return engine, about
