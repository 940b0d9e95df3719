"""Check the section `swarm` before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from kapelle.features.swarm.settings import SwarmConfig
from kapelle.settings.checks import RunToCheck
from kapelle.setup.feature import FeaturePlan


class SwarmPlan(FeaturePlan[SwarmConfig]):
    """The check of the section `swarm`."""

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield a message if the algorithm does not learn from rewards of sampled episodes."""
        if not run.algorithm.collects_episodes:
            yield f"`swarm` adds rewards to sampled episodes, but `{run.algorithm.name}` does not sample. Remove it."
