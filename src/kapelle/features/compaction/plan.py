"""Check the settings of compaction before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from kapelle.environment import DrivenByPrograms, offers
from kapelle.features.compaction.settings import CompactionConfig
from kapelle.settings.checks import RunToCheck
from kapelle.setup.feature import FeaturePlan


class CompactionPlan(FeaturePlan[CompactionConfig]):
    """The check of compaction."""

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield a message if an external program manages the conversations, or if demonstrations would have to contain summaries."""
        if offers(run.config.environment, DrivenByPrograms):
            yield "`episode.compaction` shortens only conversations that kapelle keeps, but an external program keeps its own. Remove it."
        demonstrated = "warmup" if run.config.warmup is not None else run.algorithm.name
        if self.settings.summary is not None and (
            run.config.warmup is not None or run.algorithm.data.source == "demonstrations"
        ):
            yield f"`episode.compaction.summary` is written by the agents, but the demonstrations of `{demonstrated}` contain no summaries. Remove one of the two."
