"""A trained verifier's probability that an answer is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kapelle.rows import Learners, Reader, Sample, Sampled, TurnKey, turns_of
from kapelle.signals.samples import answer_sample
from kapelle.team import VERIFIER
from kapelle.types import Group


@dataclass(frozen=True, slots=True)
class VerifierScores:
    """Gives `Signals.score`."""

    folder: str
    """Folder of the trained verifier."""
    least_auc: float | None = None
    """Least AUC that it must have reached on held-out questions; None for no limit."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, float]]:
        """Return the probability for every turn of every agent."""
        return {"score": scores(step.groups, engine)}


def scores(groups: Sequence[Group], engine: Learners) -> dict[TurnKey, float]:
    """Return the verifier's probability for every turn of every agent."""
    samples = verifier_samples(groups, engine.renderer(VERIFIER))
    scored = engine.score(list(samples.values()))
    return {key: float(score.sigmoid()) for key, score in zip(samples, scored, strict=True)}


def verifier_samples(groups: Sequence[Group], reader: Reader) -> dict[TurnKey, Sample]:
    """Return the verifier's sample of every turn of every agent."""
    return {
        key: answer_sample(VERIFIER, reader, groups[key.group].task.question, turn.text, {})
        for key, turn in turns_of(groups, trained_only=False)
    }
