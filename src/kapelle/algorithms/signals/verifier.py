"""A trained verifier's probability that an answer is right, or what several make of it together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Literal

from kapelle.algorithms.signals.samples import conversation_sample
from kapelle.errors import ModelError
from kapelle.features.reward_model.settings import RefreshConfig
from kapelle.functional.calibration import UNCALIBRATED, Calibration, read_calibration
from kapelle.rows import Learners, Reader, Sample, Sampled, TurnKey, turns_of
from kapelle.team import VERIFIER
from kapelle.types import Group

Together = Literal["mean", "least"]
"""What several verifiers give an answer: the mean of their probabilities, or the least of them."""


@dataclass(frozen=True, slots=True)
class VerifierScores:
    """Gives `Signals.score`."""

    folder: str
    """Folder of the trained verifier; of the first, where there are several."""
    least_auc: float | None = None
    """Least AUC that each must have reached on held-out questions; None for no limit."""
    refresh: RefreshConfig | None = None
    """How it goes on learning while it pays; None leaves it as it was saved."""
    others: tuple[str, ...] = ()
    """Folders of further verifiers that judge with it; none may be refreshed."""
    together: Together = "mean"

    @property
    def folders(self) -> Mapping[str, str]:
        """The critic that stands for each verifier → its folder."""
        further = {f"{VERIFIER}:{k}": folder for k, folder in enumerate(self.others, 2)}
        return {VERIFIER: self.folder, **further}

    @property
    def calibration(self) -> Calibration:
        """How its scores become probabilities, as its folder says; ModelError where it says nothing that can be read."""
        return calibration_of(self.folder)

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, float]]:
        """Return the probability for every turn of every agent."""
        return {"score": self.judge(step.groups, engine)}

    def judge(self, groups: Sequence[Group], engine: Learners) -> Mapping[TurnKey, float]:
        """Return the probability for every turn of every agent, by all verifiers together."""
        each = [
            scores(groups, engine, calibration_of(folder), critic) for critic, folder in self.folders.items()
        ]
        reduce = min if self.together == "least" else fmean
        return {key: reduce([own[key] for own in each]) for key in each[0]}


@cache
def calibration_of(folder: str) -> Calibration:
    """Return how the scores of the verifier in a folder become probabilities: as was fitted on held-out answers, else σ.

    Read once in a process: the folder may be gone later. Raises ModelError for what cannot be read.
    """
    try:
        held_out = json.loads((Path(folder) / "verifier.json").read_text("utf-8")).get("held_out") or {}
        return read_calibration((held_out.get("calibrated") or {}).get("calibration"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"How the scores of the verifier '{folder}' become probabilities cannot be read: {error!r}. Name the folder `verifier` "
            "of a checkpoint that `algorithm.name: verifier` wrote."
        ) from error


def scores(
    groups: Sequence[Group],
    engine: Learners,
    calibration: Calibration = UNCALIBRATED,
    critic: str = VERIFIER,
) -> dict[TurnKey, float]:
    """Return the probability for every turn of every agent, by the verifier that a critic stands for."""
    return {key: calibration.probability(score) for key, score in logits(groups, engine, critic).items()}


def logits(groups: Sequence[Group], engine: Learners, critic: str = VERIFIER) -> dict[TurnKey, float]:
    """Return what the verifier that a critic stands for gives every turn of every agent, not yet a probability."""
    samples = verifier_samples(groups, engine.renderer(critic), critic)
    scored = engine.score(list(samples.values()))
    return {key: float(score) for key, score in zip(samples, scored, strict=True)}


def verifier_samples(
    groups: Sequence[Group], reader: Reader, critic: str = VERIFIER
) -> dict[TurnKey, Sample]:
    """Return the verifier's sample of every turn of every agent."""
    return {
        key: conversation_sample(critic, reader, groups[key.group].task.asked, turn.text, {})
        for key, turn in turns_of(groups, trained_only=False)
    }
