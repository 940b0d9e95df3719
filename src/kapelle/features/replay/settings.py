"""The section `tasks.replay` of a recipe, which lets later steps train on past groups."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kapelle.settings.feature import FeatureSettings


class ReplayConfig(FeatureSettings):
    """Settings of the replay of past groups in which some episodes succeeded and others failed.

    The importance ratios of replayed episodes are relative to the weights that sampled them, as with `training.max_staleness`.
    """

    plan: ClassVar[str] = "kapelle.features.replay.plan:ReplayPlan"
    feature: ClassVar[str] = "kapelle.features.replay.feature:EpisodeReplay"

    groups: int = Field(default=1, ge=1)
    """Maximum number of past groups that a step trains on, in addition to its new groups."""
    capacity: int = Field(default=64, ge=1)
    """Maximum number of past groups that are stored. The newest groups are stored, with at most one group for each task."""
    max_age: int | None = Field(default=None, ge=1)
    """Number of steps after which a group is removed. With null, a group is stored until newer groups replace it."""

    @property
    def off_policy(self) -> bool:
        """See `FeatureSettings`."""
        return True
