"""Scores of answers: what a scorer gets and returns, and two scorers: a reward model of transformers, and a verifier that a run has trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from kapelle.engines.train.protocol import TrainEngine
from kapelle.errors import ContextError
from kapelle.models.reward_model import RewardModel, load_reward_model
from kapelle.runtime.files import folder_content
from kapelle.signals.samples import conversation_sample
from kapelle.team import VERIFIER
from kapelle.types import Json, Message

R = TypeVar("R")
Role = Literal["system", "user", "assistant", "tool"]
MOST_ITEMS = 4096
"""Answers in one call."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, and the conversation that it answers."""

    messages: tuple[Message, ...]
    """What comes before it; a question alone is one message of the user."""
    text: str


@dataclass(frozen=True, slots=True)
class Score:
    """What an answer is worth, or why it cannot be scored."""

    value: float | None
    """In [0, 1]: σ(logit), for a verifier the probability that the answer is right. None for one that is ungraded."""
    logit: float | None = None
    """None for one that is ungraded."""
    reason: str = ""
    """Why it is ungraded."""

    @property
    def status(self) -> Literal["scored", "ungraded"]:
        """`ungraded` says nothing about the answer, and must never be used as a reward."""
        return "ungraded" if self.value is None else "scored"

    def row(self) -> dict[str, Json]:
        """Return it as callers read it."""
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
) -> list[Score]:
    """Return the scores of a model that gives a logit for each answer that it can `read`.

    `read` raises ContextError for an answer that is too long: that one is ungraded, the others are scored.
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
                scores[place] = Score(0.5 + 0.5 * math.tanh(0.5 * logit), logit)  # σ(logit) without overflow
            else:
                scores[place] = ungraded("The model's score is not finite: its weights are broken.")
    return [scores[place] for place in range(len(answers))]


class Scorer(Protocol):
    """Scores answers; called by one thread."""

    def about(self) -> Mapping[str, Json]:
        """Return what callers are told of the model: its `name`, a hash of its `weights`, and further facts."""
        ...

    def score(self, answers: Sequence[Answered]) -> Sequence[Score]:
        """Return a score for each answer; one that the model cannot read is ungraded."""
        ...


# -------- A reward model of transformers


class ClassifierScorer:
    """Scores answers by the one label of a sequence classifier."""

    def __init__(self, model: RewardModel, about: Mapping[str, Json]) -> None:
        self._model, self._about = model, about

    def about(self) -> Mapping[str, Json]:
        """Return its name, kind and weights."""
        return self._about

    def score(self, answers: Sequence[Answered]) -> Sequence[Score]:
        """Return σ of each answer's logit; one that does not fit the model's context is ungraded."""
        return score_each(answers, self._read, self._model.logits)

    def _read(self, answered: Answered) -> Sequence[int]:
        renderer = self._model.renderer
        tokens = renderer.whole([*answered.messages, Message("assistant", answered.text)])
        if len(tokens) > renderer.context:
            raise ContextError(
                f"Question and answer have {len(tokens)} tokens; the reward model reads {renderer.context}."
            )
        return tokens


def open_reward_model(folder: Path, name: str | None = None) -> ClassifierScorer:
    """Load a folder under a name, its own unless given; ModelError names what is wrong with it."""
    model = load_reward_model(folder)
    weights = folder_content(folder, lambda path: path.suffix == ".safetensors")
    kind = type(model.model).__name__
    return ClassifierScorer(model, {"name": name or folder.resolve().name, "kind": kind, "weights": weights})


class VerifierScorer:
    """Scores answers by a verifier that a train engine holds; nothing learns."""

    def __init__(self, engine: TrainEngine, about: Mapping[str, Json]) -> None:
        self._engine, self._about = engine, about
        self._reader = engine.renderer(VERIFIER)

    def about(self) -> Mapping[str, Json]:
        """Return its name, step and weights, and how well it judged held-out answers."""
        return self._about

    def score(self, answers: Sequence[Answered]) -> Sequence[Score]:
        """Return the probability that each answer is right; one that does not fit the model's context is ungraded."""
        return score_each(
            answers,
            lambda answered: conversation_sample(
                VERIFIER, self._reader, answered.messages, answered.text, {}
            ),
            lambda samples: [float(each) for each in self._engine.score(samples)],
        )
