"""The contract of an optional feature of training: one package in `kapelle.features`, one field in a recipe.

    src/kapelle/features/mine/
      settings.py     its section: inherits from `FeatureSettings`, checks a run, names its `Feature`
      feature.py      what it does at the phases of a step: inherits from `Feature`

To add one, add its section as a field of `settings.schema.RunConfig` (or of one of its sections). To remove one, delete its
folder and that field. The core finds features by their sections and names none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kapelle.runtime.plugins import find_object
from kapelle.settings.base import Settings, parts_of
from kapelle.types import Cast, Group

if TYPE_CHECKING:
    from kapelle.algorithm import Algorithm
    from kapelle.engines.train.protocol import Objective, TrainEngine
    from kapelle.models.language_model import LanguageModel
    from kapelle.models.outline import Outline
    from kapelle.rollout.play import Play
    from kapelle.rows import Sample, Sampled, TurnKey
    from kapelle.settings.schema import RunConfig
    from kapelle.setup.team_builder import Bases
    from kapelle.team import Policy, Team
    from kapelle.training.loop import Sampler


# -------- Before a model is loaded: the section of a recipe


@dataclass(frozen=True, slots=True)
class RunToCheck:
    """A run as its settings describe it; no model is loaded."""

    config: RunConfig
    algorithm: Algorithm
    team: Team
    given: Container[str] = ()
    """Paths of models that are in memory already."""
    training: bool = True
    """Whether it is to be trained, which needs the rows and the user's own code."""
    elsewhere: bool = False
    """Whether it runs on another machine: no library or device of this one is needed."""
    absent: list[str] | None = None
    """What this machine lacks, filled in; None raises it."""


class FeatureSettings(Settings):
    """The section of a feature. A run has the feature if the section is set."""

    off_policy: ClassVar[bool] = False
    """Whether steps learn from samples of earlier weights too."""
    feature: ClassVar[str] = ""
    """`module:Class` of its `Feature`, which is called with the section and the `StartedRun`; imported when a run starts. Empty
    for a feature that acts at none of the phases."""

    def extend(self, row: Algorithm) -> Algorithm:
        """Return the algorithm's row with what the feature adds; raises ConfigError where they do not go together."""
        return row

    def policies(
        self, config: RunConfig, learners: Mapping[str, Policy], bases: Bases
    ) -> Mapping[str, Policy]:
        """Return the policies that it adds to the team, by name; `learners` are the team's trained policies."""
        return {}

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield what prevents training with it: what is wrong and where, and how to fix it."""
        yield from ()

    def check_memory(self, run: RunToCheck, models: Mapping[str, Outline]) -> Iterator[str]:
        """Yield what does not fit the machine; `models` has the shape of each base model."""
        yield from ()


def sections_of(config: RunConfig) -> dict[str, FeatureSettings]:
    """Return the sections of the features that a run has, by their dotted path, in the order of its settings."""
    return {path: part for path, part in parts_of(config) if isinstance(part, FeatureSettings)}


def without_features(config: RunConfig) -> RunConfig:
    """Return the settings without the features that are sections of their own: a trained team is used without them."""
    own = {
        name: None for name in type(config).model_fields if isinstance(getattr(config, name), FeatureSettings)
    }
    return config.model_copy(update=own)


# -------- While a run trains: the phases of a step


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run whose models are loaded."""

    config: RunConfig
    algorithm: Algorithm
    team: Team
    models: Mapping[str, LanguageModel]
    """Base name → model."""
    base_hashes: Mapping[str, str]
    engine: TrainEngine
    """Holds what is trained."""
    play: Play
    """How episodes are collected."""
    sampler: Sampler | None
    """Collects the episodes in another process (`training.overlap`); None where this process does."""
    run_dir: Path | None


Roles = Sequence[Mapping[str, Cast]]
"""For each task of a step the agents whose role another policy or player takes."""
Assign = Callable[[int, int], Roles]
"""(Number of a step, number of its tasks) → the roles."""


@dataclass(slots=True)
class StepInProgress:
    """One step of training while it is taken; the phases of the loop and the features fill it in."""

    number: int
    """From 1."""
    play: Play
    groups: list[Group] = field(default_factory=list)
    """The episodes that the step has collected."""
    earlier: list[Group] = field(default_factory=list)
    """Groups of earlier steps that this one learns from as well."""
    assign: Assign | None = None
    """Who takes which role in the tasks of steps that are collected from now on; None follows the team map."""
    metrics: dict[str, float] = field(default_factory=dict)
    restarted: bool = False
    """Whether a policy started again from earlier weights, so that nothing that was sampled so far is learned from."""


class Feature:
    """What a feature does at the phases of a step, in their order. The default of every method changes nothing."""

    def before_rollouts(self, step: StepInProgress) -> None:
        """Prepare the collection of episodes, for example assign roles."""

    def after_rollouts(self, step: StepInProgress) -> None:
        """Read `step.groups`, add metrics or earlier groups."""

    def before_update(self, step: StepInProgress) -> None:
        """Act on what the step learns from, `step.groups` and `step.earlier`, before weights change."""

    def samples(
        self, step: StepInProgress, sampled: Sampled, samples: Mapping[TurnKey, Sample]
    ) -> Mapping[TurnKey, Sample]:
        """Return what policies are trained on; `samples` has one for each turn of `sampled` that has credit."""
        return samples

    def objective(self, objective: Objective) -> Objective:
        """Return what the update minimises."""
        return objective

    def after_update(self, step: StepInProgress) -> None:
        """Act on the updated weights, before they are published to the rollout engine."""

    def forget(self) -> None:
        """Drop samples of earlier steps; called after a step with `restarted`."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it, as plain values and tensors."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""

    def pruned(self, steps: Collection[int]) -> None:
        """Release what only deleted checkpoints need; `steps` are those whose checkpoints are left."""


def started(run: StartedRun) -> dict[str, Feature]:
    """Return the features of a run, by the path of their section, in the order of its settings."""
    return {
        path: find_object(section.feature, "feature")(section, run)
        for path, section in sections_of(run.config).items()
        if section.feature
    }
