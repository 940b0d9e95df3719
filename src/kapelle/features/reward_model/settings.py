"""The section `reward_model` of a recipe, and `refresh` in it or in an algorithm with a verifier."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from kapelle.settings.base import FROM_HERE_ON
from kapelle.settings.feature import FeatureSettings
from kapelle.settings.weights import DType


class RefreshConfig(FeatureSettings):
    """How a verifier that scores the team continues to be trained, on new answers of the team that the environment grades."""

    feature: ClassVar[str] = "kapelle.features.reward_model.feature:RefreshedVerifier"

    share: float = Field(default=0.1, gt=0, le=1)
    """Share of each step's answers that is graded, which is at least one answer; a grade is a label that must be provided."""
    lr: float = Field(default=2e-4, gt=0)
    """Constant learning rate. If it is too high for the number of grades, the verifier forgets its earlier training."""
    updates: int = Field(default=4, ge=1)
    """Optimiser steps of the verifier after each step of training."""
    batch: int = Field(default=64, ge=2)
    """Graded answers in each of these steps, drawn from the remembered ones."""
    memory: int = Field(default=512, ge=2)
    """Number of graded answers that are remembered, the newest ones."""


class RewardModelConfig(FeatureSettings):
    """A trained reward model: λ times its score of a turn's answer is added to the turn's reward."""

    plan: ClassVar[str] = "kapelle.features.reward_model.plan:RewardModelPlan"
    feature: ClassVar[str] = "kapelle.features.reward_model.feature:ScoredRewards"
    rewards_turns: ClassVar[bool] = True

    path: str
    """The folder `verifier` of a checkpoint of `algorithm.name: verifier`, or `stage:NAME`."""
    weight: float = 1.0
    """λ, in units of reward; scores lie between 0 and 1."""
    device: Annotated[str | None, FROM_HERE_ON] = None
    """The device on which it runs with its own copy of the base; null shares the team's base."""
    dtype: DType | None = None
    """The compute type of its own copy; null uses the type of the section `model`."""
    refresh: RefreshConfig | None = None
    """Continued training on graded answers of the team that it scores; null leaves it as it was saved."""
