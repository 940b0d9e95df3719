"""A run whose team only acts: base models, the adapters of its newest checkpoint and a sampler; nothing that learns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from kapelle.engines.rollout.protocol import RolloutEngine, notes_of
from kapelle.engines.train.protocol import TrainEngine
from kapelle.errors import CheckpointError, ConfigError
from kapelle.models.checksums import CHECKSUMS
from kapelle.models.language_model import LanguageModel
from kapelle.models.weights import copy_weights, hash_of_base
from kapelle.rollout.play import Play, make_play
from kapelle.rows import Sample
from kapelle.runs.checkpoint_contents import load_policies, load_verifier
from kapelle.runs.checkpoint_folder import newest_valid
from kapelle.runs.named_checkpoint import named_checkpoint, policy_folder
from kapelle.runtime.files import sha256, step_of
from kapelle.runtime.randomness import derive_seed
from kapelle.services.reward.scores import Answered, Score, score_each
from kapelle.settings.schema import RunConfig
from kapelle.setup.model_loading import build_engine, build_train_engine
from kapelle.setup.preparation import prepare
from kapelle.signals.questions import conversation_sample
from kapelle.team import VERIFIER, Team
from kapelle.training.observer import Observer
from kapelle.training.provenance import config_of_run
from kapelle.training.warmup import warmed_bases
from kapelle.types import Json


@dataclass(frozen=True, slots=True)
class Served:
    """A team with its weights in memory, and no optimiser."""

    config: RunConfig
    play: Play
    step: int
    """Steps of training behind its weights."""


def open_served(
    run: Path, observer: Observer, settings: Sequence[str] = (), which: str | None = None
) -> Served:
    """Load the team of a run's checkpoint to act, the newest whole one or `which` (see `runs.named_checkpoint`); the run is only read.

    Raises CheckpointError without a checkpoint, and whatever a run of these settings would.
    """
    config = config_of_run(run, settings).model_copy(update={"reward_model": None})
    prepared = prepare(config, training=False)
    named = named_checkpoint(run, which)
    newest, step = newest_checkpoint(run, observer) if named is None else (named, step_of(named) or 0)
    held: dict[str, LanguageModel] = {}
    warmed = prepared.on_bases(
        warmed_bases(config, prepared.team, observer.warmup, observer.phase, held), held
    )
    team = warmed.team
    observer.phase("loading", ", ".join(dict.fromkeys(team.bases.values())))
    models = warmed.load()
    weights = _Weights(models, team, config.seed)
    hashes = {base: hash_of_base(model) for base, model in models.items()}
    past = {policy.name: Path(policy.past) for policy in team.policies.values() if policy.past}
    trained = {name: policy_folder(newest, name) for name in team.trained}
    load_policies(past | trained, team, weights, hashes)
    engine = build_engine(config, models, team)
    _publish(engine, team, weights, step)
    for note in notes_of(engine):
        observer.phase("engine", note)
    return Served(config, make_play(config, team, engine), step)


def newest_checkpoint(run: Path, observer: Observer) -> tuple[Path, int]:
    """Return a run's newest whole checkpoint and its step; CheckpointError without one. Damaged ones are reported."""
    newest = newest_valid(run / "checkpoints")
    for rejected in newest.rejected:
        observer.phase("checkpoint", f"passed over: {rejected.reason}")
    if newest.folder is None:
        raise CheckpointError(f"There is no whole checkpoint in {run / 'checkpoints'}. Train the run first.")
    return newest.folder, step_of(newest.folder) or 0


def _publish(engine: RolloutEngine, team: Team, weights: _Weights, step: int) -> None:
    """Tell the sampler that the weights of this step are in place."""
    for name in team.trained:
        engine.load(name, weights.weights(name), step)


class _Weights:
    """The weights of a team's policies, in the memory of its models."""

    def __init__(self, models: Mapping[str, LanguageModel], team: Team, seed: int) -> None:
        self._models, self._team = models, team
        for policy in team.policies.values():
            if policy.endpoint is None and policy.lora is not None:
                bank = models[policy.base].bank
                bank.add(policy.name, policy.lora, derive_seed(seed, "adapter", policy.name))

    def weights(self, name: str) -> Mapping[str, Tensor]:
        """Return a policy's weights by name; the tensors themselves, not copies."""
        policy = self._team.policies[name]
        model = self._models[policy.base]
        return model.base_parameters() if policy.lora is None else model.bank.parameters(name)

    def load_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Give a policy these weights."""
        copy_weights(self.weights(name), weights, f"policy '{name}'")


# -------- A verifier that a run has trained, in memory to score answers; nothing learns


class VerifierScorer:
    """Scores answers by a verifier that a train engine holds."""

    def __init__(self, engine: TrainEngine, about: Mapping[str, Json]) -> None:
        self._engine, self._about = engine, about
        self._reader = engine.renderer(VERIFIER)

    def about(self) -> Mapping[str, Json]:
        """Return its name, step and weights, and how well it judged held-out answers."""
        return self._about

    def score(self, answers: Sequence[Answered]) -> Sequence[Score]:
        """Return the probability that each answer is right; one that does not fit the model's context is ungraded."""
        return score_each(answers, self._sample, self._logits)

    def _sample(self, answered: Answered) -> Sample:
        return conversation_sample(VERIFIER, self._reader, answered.messages, answered.text, {})

    def _logits(self, samples: Sequence[Sample]) -> list[float]:
        return [float(each) for each in self._engine.score(samples)]


def open_verifier(run: Path, observer: Observer, name: str | None = None) -> VerifierScorer:
    """Load the verifier of a run's newest whole checkpoint under a name, the run's unless given; the run is only read.

    Raises ConfigError for a run that trains none, CheckpointError without a checkpoint, and whatever a run of these settings would.
    """
    config = config_of_run(run)
    prepared = prepare(config, training=False)
    critic = prepared.team.critics.get(VERIFIER)
    if critic is None or not critic.trained:
        raise ConfigError(
            f"{run} trains no verifier (`algorithm.name: {prepared.algorithm.name}`). Name a run of `algorithm.name: verifier`; "
            "of a run in stages, the folder of the stage, such as RUN/01-judge."
        )
    folder, step = newest_checkpoint(run, observer)
    held: dict[str, LanguageModel] = {}
    bases = warmed_bases(config, prepared.team, observer.warmup, observer.phase, held)
    warmed = prepared.on_bases(bases, held)
    observer.phase("loading", ", ".join(dict.fromkeys(warmed.team.bases.values())))
    models = warmed.load()
    engine = build_train_engine(config, prepared.algorithm, warmed.team, models)
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
    return VerifierScorer(engine, about)
