"""A scorer that is a reward model of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kapelle.errors import ContextError
from kapelle.models.reward_model import RewardModel, load_reward_model
from kapelle.runtime.files import folder_content
from kapelle.services.reward.scores import Answered, Score, score_each
from kapelle.types import Json, Message


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
