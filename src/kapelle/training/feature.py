"""The interface of optional training features: what they do in each phase of a step, and their state.

The module `settings/feature.py` explains how a feature is found. The smallest example is `features/entropy`.
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
    """A sampler that loads the published weights."""

    def load(self, policy: str, weights: Mapping[str, Tensor], version: int) -> None:
        """Load new weights of a policy into the sampler."""
        ...


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run whose models are loaded."""

    config: RunConfig
    algorithm: Algorithm
    team: Team
    models: Mapping[str, LanguageModel]
    """Mapping from the name of each base to its model."""
    base_hashes: Mapping[str, str]
    engine: TrainEngine
    """The train engine, which holds the weights that are trained."""
    learners: Learners
    """The object that computes scores for signals: the train engine, or processes that score in its place."""
    setup: RolloutSetup
    """The setup with which episodes are collected."""
    run_dir: Path | None = None
    players: Sequence[LoadsWeights] = ()
    """All samplers for training: first the engine of `setup`, then samplers in other processes."""


@dataclass(slots=True)
class StepInProgress:
    """The state of a training step in progress. The phases of the loop and the features fill in its fields."""

    number: int
    """The number of the step, starting from 1."""
    setup: RolloutSetup
    tasks: TrainingTasks
    """The tasks of all steps that are collected from now on, with the assigned roles."""
    groups: list[Group] = field(default_factory=list)
    """The groups of episodes that the step has collected."""
    earlier: list[Group] = field(default_factory=list)
    """Groups of earlier steps that are part of the batch of this step."""
    metrics: dict[str, float] = field(default_factory=dict)
    parity: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the differences between the log-probs of sampler and trainer, if they are compared before the update."""
    restarted: bool = False
    """Whether a policy restarted from earlier weights. If a policy restarted, all samples collected so far are dropped."""


class Feature:
    """A feature, with one method for each phase of a step, in order. By default, the methods change nothing."""

    def before_rollouts(self, step: StepInProgress) -> None:
        """Prepare the collection of episodes, for example assign roles."""

    def after_rollouts(self, step: StepInProgress) -> None:
        """Read the collected episodes (`step.groups`), and add metrics or earlier groups to the step."""

    def before_update(self, step: StepInProgress) -> None:
        """Process the batch of the step (`step.groups` and `step.earlier`) before weights change."""

    def rewarded(self, groups: Sequence[Group], signals: Signals | None) -> Sequence[Group]:
        """Return the groups with the rewards from which credit is computed. The signals are None for groups without signals."""
        return groups

    def samples(
        self, step: StepInProgress, sampled: Sampled, samples: Mapping[TurnKey, Sample]
    ) -> Mapping[TurnKey, Sample]:
        """Return the samples on which policies are trained.

        `samples` contains one sample for each turn of `sampled` that has credit.
        """
        return samples

    def objective(self, objective: Objective) -> Objective:
        """Return the objective that the update minimises."""
        return objective

    def after_update(self, step: StepInProgress) -> None:
        """Process the updated weights before they are published to the rollout engine."""

    def forget(self) -> None:
        """Drop the samples of earlier steps. This method is called after a step in which a policy restarted."""

    def state(self) -> dict[str, Any]:
        """Return the state that is stored in checkpoints, as plain values and tensors."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that a call of `state` returned."""

    def pruned(self, steps: Collection[int]) -> None:
        """Delete data that only deleted checkpoints need. The argument `steps` contains the steps of the remaining checkpoints."""


def started(run: StartedRun) -> dict[str, Feature]:
    """Return the features of a run in the order of its settings, as a mapping from the path of the settings section to the feature."""
    return {
        path: find_object(section.feature, "feature")(section, run)
        for path, section in sections_of(run.config).items()
        if section.feature
    }
