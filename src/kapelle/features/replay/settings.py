"""The section `tasks.replay` of a recipe: past groups that later steps train on."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kapelle.settings.feature import FeatureSettings


class ReplayConfig(FeatureSettings):
    """Replay of past groups in which some episodes succeeded and others did not.

    Their importance ratios are relative to the weights that sampled them, as with `training.max_staleness`.
    """

    plan: ClassVar[str] = "kapelle.features.replay.plan:ReplayPlan"
    feature: ClassVar[str] = "kapelle.features.replay.feature:EpisodeReplay"

    groups: int = Field(default=1, ge=1)
    """Maximum number of past groups that a step trains on, in addition to its own."""
    capacity: int = Field(default=64, ge=1)
    """Number of such groups that are kept: the newest, with one for each task."""
    max_age: int | None = Field(default=None, ge=1)
    """Number of steps after which a group is dropped; null keeps it as long as there is room."""

    @property
    def off_policy(self) -> bool:
        """See `FeatureSettings`."""
        return True
