"""The section `refresh` of a reward model or of an algorithm with a verifier."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kapelle.feature import FeatureSettings


class RefreshConfig(FeatureSettings):
    """How a verifier goes on learning while it pays: from answers of the team of now that the environment grades."""

    feature: ClassVar[str] = "kapelle.features.refresh.feature:RefreshedVerifier"

    share: float = Field(default=0.1, gt=0, le=1)
    """Share of each step's answers, at least one, that is graded; a grade is a label that has to be supplied."""
    lr: float = Field(default=2e-4, gt=0)
    """Learning rate, constant. One that is high for few grades makes it forget what it knew."""
    updates: int = Field(default=4, ge=1)
    """Optimiser steps of the verifier after each step of training."""
    batch: int = Field(default=64, ge=2)
    """Graded answers in each of them, drawn from those that are remembered."""
    memory: int = Field(default=512, ge=2)
    """Graded answers that are remembered, the newest."""
