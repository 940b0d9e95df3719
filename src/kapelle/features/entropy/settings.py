"""The section `entropy` of a recipe: the entropy bonus of each agent."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kapelle.settings.base import Settings
from kapelle.settings.feature import FeatureSettings


class BonusConfig(Settings):
    """Settings of the entropy bonus of one agent, which changes linearly from the first step to the last step."""

    start: float = Field(ge=0.0, allow_inf_nan=False)
    """Weight of the bonus in the first step, per nat."""
    end: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the bonus after the last step, per nat."""


class EntropyConfig(FeatureSettings):
    """Settings of entropy bonuses for individual agents, in addition to the entropy bonus in the algorithm's loss."""

    plan: ClassVar[str] = "kapelle.features.entropy.plan:EntropyPlan"
    feature: ClassVar[str] = "kapelle.features.entropy.feature:EntropyBonus"

    agents: dict[str, BonusConfig] = Field(min_length=1)
    """Mapping from each agent to its bonus, such as `{coder: {start: 0.02}}`. Other agents have no bonus."""
