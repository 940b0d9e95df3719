"""Compute scores with trained verifiers: the probability that an answer is correct, according to one verifier or several verifiers."""

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
"""How the scores of several verifiers are combined: the mean of their probabilities (`mean`), or the lowest probability
(`least`)."""


@dataclass(frozen=True, slots=True)
class VerifierScores(ReadsText):
    """A signal that computes `Signals.score` with one or several verifiers."""

    folder: str
    """The folder of the trained verifier, or of the first verifier if there are several."""
    least_auc: float | None = None
    """The minimum AUC of each verifier on held-out questions. With None, any verifier is accepted."""
    refresh: RefreshConfig | None = None
    """The settings for training the verifier further. With None, the verifier is frozen."""
    others: tuple[str, ...] = ()
    """The folders of additional verifiers. Additional verifiers cannot be combined with `refresh`."""
    together: Together = "mean"

    @property
    def folders(self) -> Mapping[str, str]:
        """A mapping from the name of each verifier's critic to the folder of the verifier."""
        others = {f"{VERIFIER}:{k}": folder for k, folder in enumerate(self.others, 2)}
        return {VERIFIER: self.folder, **others}

    @property
    def calibration(self) -> Calibration:
        """The calibration of the first verifier, read from its folder. Raises ModelError if the calibration cannot be read."""
        return calibration_of(self.folder)

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, float]]:
        """Return the probability that a turn is correct, for every turn of every agent."""
        return {"score": self.judge(step.groups, engine)}

    def judge(self, groups: Sequence[Group], engine: Learners) -> Mapping[TurnKey, float]:
        """Return, for every turn of every agent, the combined probability of all verifiers that the turn is correct."""
        by_verifier = [
            scores(groups, engine, calibration_of(folder), critic) for critic, folder in self.folders.items()
        ]
        combine = min if self.together == "least" else fmean
        return {key: combine([own[key] for own in by_verifier]) for key in by_verifier[0]}


@cache
def calibration_of(folder: str) -> Calibration:
    """Return the mapping from scores of a verifier to probabilities: the calibration fitted on held-out answers, or σ if there is none.

    A folder is read once per process, because the folder can be deleted later. Raises ModelError if the folder cannot be
    read.
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
    """Return, for every turn of every agent, the probability of one verifier that the turn is correct.

    The verifier is named by its critic.
    """
    return {key: calibration.probability(score) for key, score in logits(groups, engine, critic).items()}


def logits(groups: Sequence[Group], engine: Learners, critic: str = VERIFIER) -> dict[TurnKey, float]:
    """Return the uncalibrated score of one verifier for every turn of every agent. The verifier is named by its critic."""
    samples = verifier_samples(groups, engine.renderer(critic), critic)
    scored = engine.score(list(samples.values()))
    return {key: float(score) for key, score in zip(samples, scored, strict=True)}


def verifier_samples(
    groups: Sequence[Group], reader: Reader, critic: str = VERIFIER
) -> dict[TurnKey, Sample]:
    """Return the sample that the verifier reads for every turn of every agent."""
    return {
        key: conversation_sample(critic, reader, groups[key.group].task.prompt_messages, turn.text, {})
        for key, turn in turns_of(groups, trained_only=False)
    }
