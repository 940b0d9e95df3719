"""The interface of an optional feature of training: its work in the phases of a step, and its state.

`settings/feature.py` explains how a feature is found; `features/entropy` is the smallest one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from kapelle.algorithm import Algorithm
from kapelle.engines.train.protocol import Objective, TrainEngine
from kapelle.models.language_model import LanguageModel
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import Learners, Sample, Sampled, Signals, TurnKey
from kapelle.runtime.plugins import find_object
from kapelle.settings.feature import sections_of
from kapelle.settings.schema import RunConfig
from kapelle.team import Team
from kapelle.training.selection import TrainingTasks
from kapelle.types import Group


class LoadsWeights(Protocol):
    """A sampler that uses the published weights."""

    def load(self, policy: str, weights: Mapping[str, Tensor], version: int) -> None:
        """Load new weights of a policy."""
        ...


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run with loaded models."""

    config: RunConfig
    algorithm: Algorithm
    team: Team
    models: Mapping[str, LanguageModel]
    """Base name → model."""
    base_hashes: Mapping[str, str]
    engine: TrainEngine
    """The train engine, which holds the weights that are trained."""
    learners: Learners
    """Answers the calls of signals: the engine, or processes that score for it."""
    setup: RolloutSetup
    """How episodes are collected."""
    run_dir: Path | None = None
    players: Sequence[LoadsWeights] = ()
    """All samplers for training: first the engine of `setup`, then samplers in other processes."""


@dataclass(slots=True)
class StepInProgress:
    """One training step in progress; the phases of the loop and the features fill it in."""

    number: int
    """Number of the step, from 1."""
    setup: RolloutSetup
    tasks: TrainingTasks
    """The tasks of all steps that are collected from now on, and the roles in them."""
    groups: list[Group] = field(default_factory=list)
    """The episodes that the step has collected."""
    earlier: list[Group] = field(default_factory=list)
    """Groups of earlier steps that are part of this step's batch."""
    metrics: dict[str, float] = field(default_factory=dict)
    parity: Mapping[str, float] = field(default_factory=dict)
    """Gaps between the log-probs of sampler and trainer, if they are compared before the update."""
    restarted: bool = False
    """Whether a policy restarted from earlier weights, so that all samples so far are dropped."""


class Feature:
    """The work of a feature in the phases of a step, in order. By default, every method changes nothing."""

    def before_rollouts(self, step: StepInProgress) -> None:
        """Prepare the collection of episodes, for example by assigning roles."""

    def after_rollouts(self, step: StepInProgress) -> None:
        """Read `step.groups`, and add metrics or earlier groups."""

    def before_update(self, step: StepInProgress) -> None:
        """Act on the batch of the step, `step.groups` and `step.earlier`, before weights change."""

    def rewarded(self, groups: Sequence[Group], signals: Signals | None) -> Sequence[Group]:
        """Return groups with the rewards that credit reads; `signals` are those of the step, or None for groups without signals."""
        return groups

    def samples(
        self, step: StepInProgress, sampled: Sampled, samples: Mapping[TurnKey, Sample]
    ) -> Mapping[TurnKey, Sample]:
        """Return the samples on which policies are trained; `samples` contains one for each turn of `sampled` that has credit."""
        return samples

    def objective(self, objective: Objective) -> Objective:
        """Return the objective that the update minimises."""
        return objective

    def after_update(self, step: StepInProgress) -> None:
        """Act on the updated weights, before they are published to the rollout engine."""

    def forget(self) -> None:
        """Drop samples of earlier steps; called after a step with `restarted`."""

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps, as plain values and tensors."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""

    def pruned(self, steps: Collection[int]) -> None:
        """Release the data that only deleted checkpoints need; `steps` are the steps of the remaining checkpoints."""


def started(run: StartedRun) -> dict[str, Feature]:
    """Return the features of a run, by the path of their section, in the order of its settings."""
    return {
        path: find_object(section.feature, "feature")(section, run)
        for path, section in sections_of(run.config).items()
        if section.feature
    }
