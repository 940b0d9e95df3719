"""The section `warmup` of a recipe."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from kapelle.settings.feature import FeatureSettings


class WarmupConfig(FeatureSettings):
    """Settings of a supervised warm-up on scripted demonstrations of the roles.

    The warm-up runs before all training, and its result is cached.
    """

    plan: ClassVar[str] = "kapelle.features.warmup.plan:WarmupPlan"
    bases: ClassVar[str] = "kapelle.features.warmup.stage:warmed_bases"

    steps: int = Field(default=400, ge=1)
    """Number of optimiser steps."""
    demonstrations: int = Field(default=20_000, ge=1)
    """Number of episodes on the train split in which the scripted expert acts."""
    batch: int = Field(default=48, ge=1)
    """Number of sequences per optimiser step."""
    lr: float = Field(default=3e-3, gt=0)
    """Learning rate of the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate changes over the steps."""
