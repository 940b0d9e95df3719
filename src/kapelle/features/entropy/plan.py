"""Check the settings of the entropy bonus before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from kapelle.errors import did_you_mean
from kapelle.features.entropy.settings import EntropyConfig
from kapelle.settings.checks import RunToCheck
from kapelle.setup.feature import FeaturePlan


class EntropyPlan(FeaturePlan[EntropyConfig]):
    """The checks of the entropy bonus."""

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield a message for each agent that does not exist or is not trained, and for algorithms that do not sample."""
        names = run.team.names
        for agent in self.settings.agents:
            if agent not in names:
                yield f"`entropy.agents` names '{agent}', which is not an agent of the team.{did_you_mean(agent, names)}"
            elif not run.team.policy(agent).trained:
                yield f"`entropy.agents` names '{agent}', which is not trained. Remove it."
        if not run.algorithm.collects_episodes:
            yield f"`entropy` rewards varied samples, but `{run.algorithm.name}` does not sample. Remove it."
