"""The section `reward_model` of a recipe, and the section `refresh` in it or in an algorithm with a verifier."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from kapelle.settings.base import FROM_HERE_ON
from kapelle.settings.feature import FeatureSettings
from kapelle.settings.weights import DType


class RefreshConfig(FeatureSettings):
    """Settings for training a verifier further on new answers of the team that the environment grades."""

    feature: ClassVar[str] = "kapelle.features.reward_model.feature:RefreshedVerifier"

    share: float = Field(default=0.1, gt=0, le=1)
    """Share of the answers of each step that is graded (at least one answer). Each grade is a label that must be provided."""
    lr: float = Field(default=2e-4, gt=0)
    """Constant learning rate of the verifier. If the learning rate is too high for the number of grades, the verifier forgets its earlier
    training."""
    updates: int = Field(default=4, ge=1)
    """Number of optimiser steps of the verifier after each training step."""
    batch: int = Field(default=64, ge=2)
    """Number of graded answers in each optimiser step, drawn from the stored answers."""
    memory: int = Field(default=512, ge=2)
    """Maximum number of graded answers that are stored. The newest answers are stored."""


class RewardModelConfig(FeatureSettings):
    """Settings of a trained reward model, whose weighted score of a turn's answer is added to the reward of the turn."""

    plan: ClassVar[str] = "kapelle.features.reward_model.plan:RewardModelPlan"
    feature: ClassVar[str] = "kapelle.features.reward_model.feature:ScoredRewards"
    rewards_turns: ClassVar[bool] = True

    path: str
    """Folder `verifier` of a checkpoint that was trained with `algorithm.name: verifier`, or `stage:NAME`."""
    weight: float = 1.0
    """Weight λ of the score, in units of reward. Scores are between 0 and 1."""
    device: Annotated[str | None, FROM_HERE_ON] = None
    """Device for a separate copy of the base model. With null, the reward model shares the base model of the team."""
    dtype: DType | None = None
    """Compute type of the separate copy of the base model. With null, the type in the section `model` is used."""
    refresh: RefreshConfig | None = None
    """Settings for training the verifier further on graded answers of the team that it scores. With null, the saved verifier is not
    changed."""
