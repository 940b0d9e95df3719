"""The section `entropy` of a recipe: the entropy bonus of each agent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from kapelle.errors import did_you_mean
from kapelle.feature import FeatureSettings, RunToCheck
from kapelle.settings.base import Settings


class BonusConfig(Settings):
    """The entropy bonus of one agent, in a straight line from the first step to the last one."""

    start: float = Field(ge=0.0, allow_inf_nan=False)
    """Weight of the bonus in the first step, per nat."""
    end: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight after the last step."""


class EntropyConfig(FeatureSettings):
    """An entropy bonus for single agents, in addition to that of the algorithm's loss."""

    feature: ClassVar[str] = "kapelle.features.entropy.feature:EntropyBonus"

    agents: dict[str, BonusConfig] = Field(min_length=1)
    """Agent → its bonus; the others have none: `{coder: {start: 0.02}}`."""

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield agents that do not exist or are not trained, and algorithms that sample nothing."""
        names = run.team.names
        for agent in self.agents:
            if agent not in names:
                yield f"`entropy.agents` names '{agent}', which is no agent of the team.{did_you_mean(agent, names)}"
            elif not run.team.policy(agent).trained:
                yield f"`entropy.agents` names '{agent}', which is not trained. Remove it."
        if not run.algorithm.plays:
            yield f"`entropy` rewards varied samples, and `{run.algorithm.name}` samples none. Remove it."
