"""The section `tasks.replay` of a recipe: past groups that are learned from again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from kapelle.feature import FeatureSettings, RunToCheck


class ReplayConfig(FeatureSettings):
    """Past groups in which some episodes succeeded and others did not, learned from again.

    Their ratios are to the weights that sampled them, as for `training.max_staleness`.
    """

    off_policy: ClassVar[bool] = True
    feature: ClassVar[str] = "kapelle.features.replay.feature:EpisodeReplay"

    groups: int = Field(default=1, ge=1)
    """Most past groups that a step learns from, beside its own."""
    capacity: int = Field(default=64, ge=1)
    """Newest such groups that are kept, one for each task."""
    max_age: int | None = Field(default=None, ge=1)
    """Steps after which a group is dropped; null keeps it as long as there is room."""

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield why past episodes cannot be learned from."""
        algorithm = run.algorithm
        if not algorithm.plays:
            yield f"`tasks.replay` learns from past episodes of the team, and `{algorithm.name}` collects none. Remove it."
        if any(hook.moves_weights for hook in algorithm.after_update):
            yield f"`tasks.replay` compares with the weights that sampled, and `{algorithm.name}` exchanges weights. Remove it."
        if algorithm.data.tree is not None or algorithm.data.widths:
            yield (
                f"`tasks.replay` repeats whole episodes, and those of `{algorithm.name}` branch. Remove it, or set "
                "`algorithm.tree: false`."
            )
