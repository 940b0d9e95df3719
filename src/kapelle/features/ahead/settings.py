"""The settings of rollouts ahead of the update.

These settings belong to the section `training` of a recipe.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from kapelle.settings.base import FREE
from kapelle.settings.feature import FeatureSettings

PARTIAL = 0.25
"""Value of `partial_rollouts` that `true` stands for."""


class AheadSettings(FeatureSettings):
    """Settings for collecting the episodes of a step before the update of an earlier step."""

    plan: ClassVar[str] = "kapelle.features.ahead.plan:AheadPlan"

    max_staleness: int = Field(default=0, ge=0)
    """Number of steps by which rollouts may run ahead of the update. With 0, training is on-policy. With larger values, every step except
    the first ones trains on samples of older weights; see `algorithm.loss.importance_cap` and `algorithm.gae.vtrace`."""
    overlap: Annotated[bool, FREE] = False
    """Whether a second process samples during the update. The second process needs another copy of the base models, and saves time only
    if `max_staleness` is at least 1. The results are bitwise identical."""
    partial_rollouts: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Maximum share of the groups of a step that may be unfinished when the step ends; `true` stands for 0.25. The next step continues
    these groups with its weights, so that no step waits for its longest episodes. If `max_staleness` is 2 or more, one of its steps is
    used for running ahead, and the other steps are used for unfinished groups. No token is older than `max_staleness` steps."""

    @field_validator("partial_rollouts", mode="before")
    @classmethod
    def _usual_share(cls, value: object) -> object:
        return PARTIAL if value is True else value

    @property
    def off_policy(self) -> bool:
        """See `FeatureSettings`."""
        return self.max_staleness > 0

    @property
    def rollouts(self) -> str:
        """See `FeatureSettings`. Partial rollouts need a `max_staleness` of at least 1."""
        return "kapelle.features.ahead.process:rollouts_ahead" if self.overlap or self.max_staleness else ""
