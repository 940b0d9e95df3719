"""The sections `tasks.difficulty` and `tasks.curriculum` of a recipe."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from kapelle.settings.feature import FeatureSettings

DRAWS = "kapelle.features.curriculum.draws:DrawsByDifficulty"


class DifficultyConfig(FeatureSettings):
    """Filters the tasks of a finite train split by the team's solve rate, measured before the first step."""

    plan: ClassVar[str] = "kapelle.features.curriculum.plan:DifficultyPlan"
    feature: ClassVar[str] = "kapelle.features.curriculum.feature:MeasuredDifficulty"
    draws: ClassVar[str] = DRAWS

    low: float = Field(default=0.0, ge=0.0, le=1.0)
    """Tasks with a lower solve rate are excluded."""
    high: float = Field(default=1.0, ge=0.0, le=1.0)
    """Tasks with a higher solve rate are excluded."""
    samples: int = Field(default=4, ge=1)
    """Episodes per task, sampled as in training."""

    @model_validator(mode="after")
    def _ordered(self) -> DifficultyConfig:
        if self.low > self.high:
            raise ValueError(f"`low: {self.low}` is above `high: {self.high}`, so that no task remains")
        return self


class CurriculumConfig(FeatureSettings):
    """Easy tasks first: each step draws from the easiest share of the tasks, which grows until it includes all."""

    plan: ClassVar[str] = "kapelle.features.curriculum.plan:CurriculumPlan"
    draws: ClassVar[str] = DRAWS

    by: str = "solve_rate"
    """The difficulty of a task: `solve_rate`, as measured by `tasks.difficulty`, or a field of the tasks' data that is a number or
    ends in a number (`Level 3`), where larger means harder."""
    start: float = Field(default=0.25, gt=0.0, le=1.0)
    """Share of the tasks that the first step draws from."""
    steps: int = Field(default=100, ge=1)
    """Steps until all tasks are drawn from; the share grows linearly."""
