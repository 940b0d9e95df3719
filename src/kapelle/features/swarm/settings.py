"""The section `swarm` of a recipe: rewards for calling other agents in parallel."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kapelle.settings.feature import FeatureSettings


class SwarmConfig(FeatureSettings):
    """Settings of the rewards of PARL (arXiv:2602.02276) for agents that call other agents.

    An agent's turn that caused calls receives λ₁·r_parallel + λ₂·r_finish. Both weights decrease linearly to 0.
    The rewards are shared in the team like those of the environment (`algorithm.team_reward`).
    """

    plan: ClassVar[str] = "kapelle.features.swarm.plan:SwarmPlan"
    feature: ClassVar[str] = "kapelle.features.swarm.feature:SwarmRewards"
    rewards_turns: ClassVar[bool] = True

    parallel: float = Field(default=0.3, ge=0.0, allow_inf_nan=False)
    """Weight λ₁ in the first step. r_parallel increases from 0 for one call to 1 for `calls` simultaneous calls."""
    finish: float = Field(default=0.3, ge=0.0, allow_inf_nan=False)
    """Weight λ₂ in the first step. r_finish is the fraction of the calls that ended by themselves and are not empty."""
    calls: int = Field(default=4, ge=2)
    """Number of calls by one turn from which r_parallel is 1."""
    until: float = Field(default=0.5, gt=0.0, le=1.0)
    """Fraction of the run's steps after which both weights are 0."""
