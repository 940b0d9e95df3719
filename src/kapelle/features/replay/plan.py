"""Check the settings of replay before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from kapelle.features.replay.settings import ReplayConfig
from kapelle.settings.checks import RunToCheck
from kapelle.setup.feature import FeaturePlan


class ReplayPlan(FeaturePlan[ReplayConfig]):
    """The checks of replay."""

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield the reasons why a run cannot be trained on past episodes."""
        algorithm = run.algorithm
        if not algorithm.collects_episodes:
            yield f"`tasks.replay` learns from past episodes of the team, but `{algorithm.name}` collects none. Remove it."
        if any(hook.moves_weights for hook in algorithm.after_update):
            yield f"`tasks.replay` compares policies with the weights that sampled, but `{algorithm.name}` exchanges weights. Remove it."
        if algorithm.data.tree is not None or algorithm.data.widths:
            yield (
                f"`tasks.replay` repeats whole episodes, but those of `{algorithm.name}` branch. Remove it, or set "
                "`algorithm.tree: false`."
            )
