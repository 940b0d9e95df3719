"""Scores of answers: the interface of scorers, and two scorers (a transformers reward model, and a verifier that a run has trained)."""

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
"""Maximum number of answers in one call."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, and the conversation before it."""

    messages: tuple[Message, ...]
    """The conversation before the answer; a single question is one message of the user."""
    text: str


@dataclass(frozen=True, slots=True)
class Score:
    """The score of an answer, or the reason why it has none."""

    value: float | None
    """The score in [0, 1]: σ(logit). For a verifier, it is the probability that the answer is correct, which is calibrated if
    its run has done so. None for an ungraded answer."""
    logit: float | None = None
    """The logit; None for an ungraded answer."""
    reason: str = ""
    """Why the answer is ungraded."""

    @property
    def status(self) -> Literal["scored", "ungraded"]:
        """`scored` or `ungraded`. An ungraded answer has no score; exclude it, and never use it as a reward."""
        return "ungraded" if self.value is None else "scored"

    def row(self) -> dict[str, Json]:
        """Return the score as callers read it."""
        if self.value is None:
            return {"status": "ungraded", "reason": self.reason}
        return {"status": "scored", "score": self.value, "logit": self.logit}


def ungraded(reason: str) -> Score:
    """Return the score of an answer that cannot be scored."""
    return Score(None, reason=reason)


def score_each(
    answers: Sequence[Answered],
    read: Callable[[Answered], R],
    logits: Callable[[Sequence[R]], Sequence[float]],
    calibration: Calibration = UNCALIBRATED,
) -> list[Score]:
    """Return the scores of a model that computes a logit for each answer that it can `read`; `calibration` turns it into a probability.

    `read` raises ContextError for an answer that is too long: this answer is ungraded, and the others are scored.
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
    """Scores answers; only one thread calls it."""

    about: Mapping[str, Json]
    """The model's description for callers: its `name`, a hash of its `weights`, and further facts."""
    score: Callable[[Sequence[Answered]], Sequence[Score]]
    """Returns a score for each answer; an answer that does not fit the model's context is ungraded."""


def open_reward_model(folder: Path, name: str | None = None) -> Scorer:
    """Load a transformers reward model, whose score is the logit of its only label. Raises ModelError for an unusable folder.

    The model's name is the folder's name unless `name` is given.
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
    """Return a scorer that uses a verifier in a train engine: the score is the probability that an answer is correct.

    `about` contains the verifier's accuracy (`held_out`), which includes how its scores are turned into probabilities.
    """
    renderer = engine.renderer(VERIFIER)
    calibrated = (about.get("held_out") or {}).get("calibrated") or {}
    calibration = read_calibration(calibrated.get("calibration"))

    def read(answered: Answered) -> Sample:
        return conversation_sample(VERIFIER, renderer, answered.messages, answered.text, {})

    def logits(samples: Sequence[Sample]) -> list[float]:
        return [float(each) for each in engine.score(samples)]

    return Scorer(about, lambda answers: score_each(answers, read, logits, calibration))
