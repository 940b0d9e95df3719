"""Defines the interface of scorers of answers, and scorers for transformers reward models and for verifiers that a run has trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from kapelle.algorithms.signals.samples import conversation_sample
from kapelle.engines.train.protocol import TrainEngine
from kapelle.errors import ContextError
from kapelle.functional.calibration import UNCALIBRATED, Calibration, read_calibration
from kapelle.models.language_model import load_reward_model
from kapelle.rows import Sample
from kapelle.runtime.files import folder_content
from kapelle.team import VERIFIER
from kapelle.types import Json, Message

R = TypeVar("R")
Role = Literal["system", "user", "assistant", "tool"]
MOST_ITEMS = 4096
"""The maximum number of answers in one call."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer together with the conversation before it."""

    messages: tuple[Message, ...]
    """The conversation before the answer. A single question is one user message."""
    text: str


@dataclass(frozen=True, slots=True)
class Score:
    """The score of an answer, or the reason why the answer has no score."""

    value: float | None
    """The score σ(logit) in [0, 1], or None for an ungraded answer. For a verifier, the score is the probability that the
    answer is correct. This probability is calibrated if the verifier's run has calibrated it."""
    logit: float | None = None
    """The logit of the score, or None for an ungraded answer."""
    reason: str = ""
    """The reason why the answer is ungraded."""

    @property
    def status(self) -> Literal["scored", "ungraded"]:
        """The status of the answer, which is `scored` or `ungraded`.

        An ungraded answer has no score, so it must be excluded and never be used as a reward.
        """
        return "ungraded" if self.value is None else "scored"

    def row(self) -> dict[str, Json]:
        """Return the score in the JSON format for callers."""
        if self.value is None:
            return {"status": "ungraded", "reason": self.reason}
        return {"status": "scored", "score": self.value, "logit": self.logit}


def ungraded(reason: str) -> Score:
    """Return a `Score` without a value for an answer that cannot be scored."""
    return Score(None, reason=reason)


def score_each(
    answers: Sequence[Answered],
    read: Callable[[Answered], R],
    logits: Callable[[Sequence[R]], Sequence[float]],
    calibration: Calibration = UNCALIBRATED,
) -> list[Score]:
    """Return the scores of a model that computes a logit for each answer that `read` accepts.

    The argument `calibration` converts the logit to a probability. The function `read` raises ContextError for an
    answer that is too long. Such an answer is ungraded, and the other answers are scored.
    """
    found: dict[int, R] = {}
    scores: dict[int, Score] = {}
    for place, answer in enumerate(answers):
        try:
            found[place] = read(answer)
        except ContextError as error:
            scores[place] = ungraded(str(error))
    if found:
        for place, logit in zip(found, logits(list(found.values())), strict=True):
            if math.isfinite(logit):
                scores[place] = Score(calibration.probability(logit), logit)
            else:
                scores[place] = ungraded("The model's score is not finite, because its weights are broken.")
    return [scores[place] for place in range(len(answers))]


@dataclass(frozen=True, slots=True)
class Scorer:
    """A model that scores answers. Only one thread may call it."""

    about: Mapping[str, Json]
    """The description of the model for callers, which contains its `name`, a hash of its `weights`, and additional facts."""
    score: Callable[[Sequence[Answered]], Sequence[Score]]
    """A function that returns a score for each answer. An answer that does not fit into the model's context is ungraded."""


def open_reward_model(folder: Path, name: str | None = None) -> Scorer:
    """Load a transformers reward model.

    The score is the logit of the model's only label. Raises ModelError for a folder that cannot be used. The name of
    the model is `name` or, by default, the name of the folder.
    """
    model = load_reward_model(folder)
    weights = folder_content(folder, lambda path: path.suffix == ".safetensors")
    about = {"name": name or folder.resolve().name, "kind": type(model.model).__name__, "weights": weights}

    def read(answered: Answered) -> Sequence[int]:
        tokens = model.renderer.whole([*answered.messages, Message("assistant", answered.text)])
        if len(tokens) > model.renderer.context:
            raise ContextError(
                f"Question and answer have {len(tokens)} tokens, but the context of the reward model has "
                f"{model.renderer.context}."
            )
        return tokens

    return Scorer(about, lambda answers: score_each(answers, read, model.logits))


def verifier_scorer(engine: TrainEngine, about: Mapping[str, Json]) -> Scorer:
    """Return a scorer that uses a verifier in a train engine. The score is the probability that an answer is correct.

    The argument `about` contains the accuracy of the verifier (`held_out`), which includes the calibration of its
    scores.
    """
    renderer = engine.renderer(VERIFIER)
    calibrated = (about.get("held_out") or {}).get("calibrated") or {}
    calibration = read_calibration(calibrated.get("calibration"))

    def read(answered: Answered) -> Sample:
        return conversation_sample(VERIFIER, renderer, answered.messages, answered.text, {})

    def logits(samples: Sequence[Sample]) -> list[float]:
        return [float(each) for each in engine.score(samples)]

    return Scorer(about, lambda answers: score_each(answers, read, logits, calibration))
