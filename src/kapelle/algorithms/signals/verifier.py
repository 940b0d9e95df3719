"""Scores of trained verifiers: the probability that an answer is correct, by one verifier or by several combined."""

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
from kapelle.rows import Learners, Reader, ReadsText, Sample, Sampled, TurnKey, turns_of
from kapelle.team import VERIFIER
from kapelle.types import Group

Together = Literal["mean", "least"]
"""Combined score of several verifiers: the mean of their probabilities, or the lowest."""


@dataclass(frozen=True, slots=True)
class VerifierScores(ReadsText):
    """Signal that gives `Signals.score`."""

    folder: str
    """Folder of the trained verifier, or of the first of several."""
    least_auc: float | None = None
    """Minimum AUC of each verifier on held-out questions; None accepts any."""
    refresh: RefreshConfig | None = None
    """Settings of the verifier's continued training; None keeps it frozen."""
    others: tuple[str, ...] = ()
    """Folders of further verifiers; they cannot be combined with `refresh`."""
    together: Together = "mean"

    @property
    def folders(self) -> Mapping[str, str]:
        """Mapping from the name of each verifier's critic to the verifier's folder."""
        others = {f"{VERIFIER}:{k}": folder for k, folder in enumerate(self.others, 2)}
        return {VERIFIER: self.folder, **others}

    @property
    def calibration(self) -> Calibration:
        """Mapping from the verifier's scores to probabilities, read from its folder; ModelError if that fails."""
        return calibration_of(self.folder)

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, float]]:
        """Return the probability for every turn of every agent."""
        return {"score": self.judge(step.groups, engine)}

    def judge(self, groups: Sequence[Group], engine: Learners) -> Mapping[TurnKey, float]:
        """Return the combined probability of all verifiers for every turn of every agent."""
        by_verifier = [
            scores(groups, engine, calibration_of(folder), critic) for critic, folder in self.folders.items()
        ]
        combine = min if self.together == "least" else fmean
        return {key: combine([own[key] for own in by_verifier]) for key in by_verifier[0]}


@cache
def calibration_of(folder: str) -> Calibration:
    """Return the mapping from a verifier's scores to probabilities: the fit on held-out answers, else σ.

    A folder is read once per process, because it can be deleted later. Raises ModelError if it cannot be read.
    """
    try:
        held_out = json.loads((Path(folder) / "verifier.json").read_text("utf-8")).get("held_out") or {}
        return read_calibration((held_out.get("calibrated") or {}).get("calibration"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"The calibration of the verifier '{folder}' cannot be read: {error!r}. Use the folder `verifier` of a checkpoint that was trained with "
            "`algorithm.name: verifier`."
        ) from error


def scores(
    groups: Sequence[Group],
    engine: Learners,
    calibration: Calibration = UNCALIBRATED,
    critic: str = VERIFIER,
) -> dict[TurnKey, float]:
    """Return the probability for every turn of every agent by one verifier, named by its critic."""
    return {key: calibration.probability(score) for key, score in logits(groups, engine, critic).items()}


def logits(groups: Sequence[Group], engine: Learners, critic: str = VERIFIER) -> dict[TurnKey, float]:
    """Return the uncalibrated score of every turn of every agent by one verifier, named by its critic."""
    samples = verifier_samples(groups, engine.renderer(critic), critic)
    scored = engine.score(list(samples.values()))
    return {key: float(score) for key, score in zip(samples, scored, strict=True)}


def verifier_samples(
    groups: Sequence[Group], reader: Reader, critic: str = VERIFIER
) -> dict[TurnKey, Sample]:
    """Return the verifier's sample of every turn of every agent."""
    return {
        key: conversation_sample(critic, reader, groups[key.group].task.prompt_messages, turn.text, {})
        for key, turn in turns_of(groups, trained_only=False)
    }
