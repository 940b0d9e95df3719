"""Check the settings of difficulty and curriculum before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from kapelle.environment import task_of
from kapelle.errors import noting
from kapelle.features.curriculum.draws import SOLVE_RATE, hardness
from kapelle.features.curriculum.settings import CurriculumConfig, DifficultyConfig
from kapelle.settings.checks import RunToCheck
from kapelle.setup.feature import FeaturePlan


class DifficultyPlan(FeaturePlan[DifficultyConfig]):
    """The checks of a filter that selects tasks by their solve rates."""

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield the reasons why the solve rates of the tasks cannot be measured."""
        environment, training = run.config.environment, run.config.training
        if environment.size("train") is None:
            yield f"`tasks.difficulty` measures every training task, but `{environment.name}` generates tasks without end. Remove it."
        if not run.algorithm.collects_episodes:
            yield f"`tasks.difficulty` measures the team's episodes, but `{run.algorithm.name}` collects none. Remove it."
        if training.epochs is not None:
            yield "`training.epochs` and `tasks.difficulty` cannot be combined. Set `training.steps` instead."


class CurriculumPlan(FeaturePlan[CurriculumConfig]):
    """The checks of a curriculum."""

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield a message if solve rates are needed but not measured. Raises ConfigError if the data of the tasks lacks the field."""
        if self.settings.by != SOLVE_RATE:
            with noting(run.absent):
                hardness(task_of(run.config.environment, "train", 0), self.settings.by)
        elif run.config.tasks.difficulty is None:
            yield "`tasks.curriculum` needs solve rates, which are not measured. Set `tasks.difficulty: {}` too."
