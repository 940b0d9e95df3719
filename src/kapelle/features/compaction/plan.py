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
        """Yield a message if an external program manages the conversations, which compaction does not support."""
        if offers(run.config.environment, DrivenByPrograms):
            yield "`episode.compaction` shortens only conversations that kapelle keeps, but an external program keeps its own. Remove it."
