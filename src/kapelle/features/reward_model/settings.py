"""The section `reward_model` of a recipe, and `refresh` in it or in an algorithm with a verifier."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from kapelle.algorithm import Algorithm
from kapelle.errors import ConfigError
from kapelle.feature import FeatureSettings
from kapelle.settings.base import FROM_HERE_ON
from kapelle.settings.weights import DType


class RefreshConfig(FeatureSettings):
    """How a verifier goes on learning while it pays: from answers of the team of now that the environment grades."""

    feature: ClassVar[str] = "kapelle.features.reward_model.feature:RefreshedVerifier"

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


class RewardModelConfig(FeatureSettings):
    """A trained reward model: λ times its score of a turn's answer is added to the reward of the turn."""

    path: str
    """The folder `verifier` of a checkpoint of `algorithm.name: verifier`, or `stage:NAME`."""
    weight: float = 1.0
    """λ, in units of reward; scores lie between 0 and 1."""
    device: Annotated[str | None, FROM_HERE_ON] = None
    """The device on which it runs with its own copy of the base; null shares the team's base."""
    dtype: DType | None = None
    """The compute type of a copy of its own; null is that of the section `model`."""
    refresh: RefreshConfig | None = None
    """Lets it go on learning from graded answers of the team that it pays; null leaves it as it was saved."""

    def extend(self, row: Algorithm) -> Algorithm:
        """Return the row with the scores as a signal; ConfigError where the algorithm does not learn from rewards of turns."""
        from kapelle.signals.verifier import VerifierScores

        if row.need(VerifierScores) or (row.data.scores and row.returns is None):
            raise ConfigError(
                f"`reward_model` is added to the environment's reward, but `{row.name}` is rewarded by a verifier's scores alone. "
                f"Remove it, and set `algorithm.verifier: {self.path}`."
            )
        if row.returns is None or not row.plays:
            raise ConfigError(
                f"`reward_model` is added to the reward of a turn, but `{row.name}` does not learn from such rewards. Remove it, or "
                "set an algorithm that does, for example "
                "`algorithm.name: grpo`."
            )
        if row.data.tree is not None:
            raise ConfigError(
                f"`reward_model` scores the turns of an episode, but `{row.name}` with a tree learns from what its candidates "
                "earn. Remove it, or set `algorithm.tree: false`."
            )
        if row.data.interventions is not None:
            raise ConfigError(
                f"`reward_model` scores the turns of an episode, but `{row.name}` learns from what episodes earn that are played on. Remove "
                "it, or set an algorithm that plays none again, for example `algorithm.name: grpo`."
            )
        return replace(row, needs=(*row.needs, VerifierScores(self.path, refresh=self.refresh)))
