"""A verifier that a run has trained, in memory to score answers; nothing learns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from kapelle.engines.train.protocol import TrainEngine
from kapelle.errors import ConfigError
from kapelle.models.checksums import CHECKSUMS
from kapelle.models.language_model import LanguageModel
from kapelle.rows import Sample
from kapelle.runs.checkpoint_contents import load_verifier
from kapelle.runtime.manifest import sha256
from kapelle.services.reward.scores import Answered, Score, score_each
from kapelle.setup.model_loading import build_train_engine
from kapelle.setup.preparation import prepare
from kapelle.signals.questions import conversation_sample
from kapelle.team import VERIFIER
from kapelle.training.observer import Observer
from kapelle.training.resuming import config_of_run
from kapelle.training.served import newest_checkpoint
from kapelle.training.warmup import warmed_bases
from kapelle.types import Json


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
