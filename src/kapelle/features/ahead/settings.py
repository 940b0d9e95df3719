"""The settings of rollouts ahead of the update; they belong to the section `training` of a recipe."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from kapelle.settings.base import FREE
from kapelle.settings.feature import FeatureSettings

PARTIAL = 0.25
"""Share of groups that `partial_rollouts: true` means."""


class AheadSettings(FeatureSettings):
    """Settings for collecting episodes before the update that precedes their step."""

    plan: ClassVar[str] = "kapelle.features.ahead.plan:AheadPlan"

    max_staleness: int = Field(default=0, ge=0)
    """Steps by which rollouts may run ahead of the update; 0 is on-policy. Above 0, every step except the first ones
    trains on samples of older weights: see `algorithm.loss.importance_cap` and `algorithm.gae.vtrace`."""
    overlap: Annotated[bool, FREE] = False
    """Whether a second process samples during the update. It needs a second copy of the base models, and saves time with a
    `max_staleness` of 1 or more. The results are bitwise identical."""
    partial_rollouts: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Maximum share of a step's groups that may be unfinished when the step ends; `true` means a quarter. The next step continues
    them with its weights, so that no step waits for its longest episodes. If `max_staleness` is 2 or more, one of its steps is used
    for running ahead and the others for unfinished groups; no token is older than `max_staleness`."""

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
        """See `FeatureSettings`; partial rollouts need a `max_staleness` of 1."""
        return "kapelle.features.ahead.process:rollouts_ahead" if self.overlap or self.max_staleness else ""
