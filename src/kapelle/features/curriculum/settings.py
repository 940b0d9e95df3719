"""The sections `tasks.difficulty` and `tasks.curriculum` of a recipe."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from kapelle.settings.feature import FeatureSettings

DRAWS = "kapelle.features.curriculum.draws:DrawsByDifficulty"


class DifficultyConfig(FeatureSettings):
    """Settings of a filter that selects tasks of a finite train split by the team's solve rate, which is measured before the first step."""

    plan: ClassVar[str] = "kapelle.features.curriculum.plan:DifficultyPlan"
    feature: ClassVar[str] = "kapelle.features.curriculum.feature:MeasuredDifficulty"
    draws: ClassVar[str] = DRAWS

    low: float = Field(default=0.0, ge=0.0, le=1.0)
    """Minimum solve rate. Tasks with a lower solve rate are excluded."""
    high: float = Field(default=1.0, ge=0.0, le=1.0)
    """Maximum solve rate. Tasks with a higher solve rate are excluded."""
    samples: int = Field(default=4, ge=1)
    """Number of episodes per task that measure the solve rate, sampled as in training."""

    @model_validator(mode="after")
    def _ordered(self) -> DifficultyConfig:
        if self.low > self.high:
            raise ValueError(f"`low: {self.low}` is above `high: {self.high}`, so that no task remains")
        return self


class CurriculumConfig(FeatureSettings):
    """Settings of a curriculum: each step draws from the easiest share of the tasks, which grows until it includes all tasks."""

    plan: ClassVar[str] = "kapelle.features.curriculum.plan:CurriculumPlan"
    draws: ClassVar[str] = DRAWS

    by: str = "solve_rate"
    """Measure of the difficulty of a task: `solve_rate`, which `tasks.difficulty` measures, or the name of a field of the tasks' data.
    The field must be a number or end with a number (`Level 3`), where larger numbers mean harder tasks."""
    start: float = Field(default=0.25, gt=0.0, le=1.0)
    """Share of the tasks from which the first step draws."""
    steps: int = Field(default=100, ge=1)
    """Number of steps until tasks are drawn from all tasks. The share grows linearly."""
