"""The settings of rollouts ahead of the update.

These settings belong to the section `training` of a recipe.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kapelle.settings.feature import FeatureSettings


class AheadSettings(FeatureSettings):
    """Settings for collecting the episodes of a step before the update of an earlier step."""

    plan: ClassVar[str] = "kapelle.features.ahead.plan:AheadPlan"

    max_staleness: int = Field(default=0, ge=0)
    """Number of steps by which rollouts may run ahead of the update. With 0, training is on-policy. With larger values, every step except
    the first ones trains on samples of older weights; see `algorithm.loss.importance_cap` and `algorithm.gae.vtrace`."""
    asynchronous: bool = False
    """Whether other processes sample without interruption, also during updates, and each step trains on whichever groups are finished. No
    step waits for its longest episodes, unless they would become older than `max_staleness` steps. A run is then not repeatable. The
    sampling process needs another copy of the base models."""

    @property
    def off_policy(self) -> bool:
        """See `FeatureSettings`."""
        return self.max_staleness > 0

    @property
    def rollouts(self) -> str:
        """See `FeatureSettings`."""
        return "kapelle.features.ahead.start:rollouts_ahead" if self.max_staleness else ""
