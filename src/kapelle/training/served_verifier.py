"""A verifier that a run has trained, in memory to score answers; nothing learns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from kapelle.engines.train.protocol import TrainEngine
from kapelle.errors import ConfigError, ContextError
from kapelle.models.language_model import LanguageModel
from kapelle.models.sealed import SEAL
from kapelle.rows import Sample
from kapelle.runs.checkpoint_contents import load_verifier
from kapelle.runtime.manifest import sha256
from kapelle.services.reward.scores import Answered, Score, ungraded
from kapelle.setup.model_loading import build_train_engine
from kapelle.setup.preparation import prepare
from kapelle.signals.questions import conversation_sample
from kapelle.team import VERIFIER
from kapelle.training.observer import Observer
from kapelle.training.resuming import config_of_run
from kapelle.training.served import newest_checkpoint
from kapelle.training.warmup import warmed_bases
from kapelle.types import Json

LONGEST_TOKEN = 256
"""Characters; a text with more of them for each token that the model reads is not even tokenised."""


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
        samples = [self._sample(each) for each in answers]
        logits = iter(self._engine.score([each for each in samples if isinstance(each, Sample)]))
        return [
            _score(float(next(logits))) if isinstance(each, Sample) else ungraded(each) for each in samples
        ]

    def _sample(self, answered: Answered) -> Sample | str:
        """Return what the verifier reads, or why it cannot."""
        characters = len(answered.text) + sum(len(each.content) for each in answered.messages)
        if characters > LONGEST_TOKEN * self._reader.context:
            return f"{characters:,} characters are too long; the verifier's model reads {self._reader.context} tokens."
        try:
            return conversation_sample(VERIFIER, self._reader, answered.messages, answered.text, {})
        except ContextError as error:
            return str(error)


def _score(logit: float) -> Score:
    if not math.isfinite(logit):
        return ungraded("The verifier's score is not finite: its weights are broken.")
    return Score(0.5 + 0.5 * math.tanh(0.5 * logit), logit)


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
        "weights": sha256(folder / "verifier" / SEAL),
        "base": kept["base"],
        "held_out": kept["held_out"],
        "sources": dict(config.environment.sources),
    }
    return VerifierScorer(engine, about)
