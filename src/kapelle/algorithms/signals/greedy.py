"""Every task played once more with greedy sampling: a baseline without a critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kapelle.rows import Learners, Sampled
from kapelle.types import Episode


@dataclass(frozen=True, slots=True)
class GreedyBaseline:
    """Gives `Signals.greedy`; a task whose greedy episode failed is left out."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[int, Episode]]:
        """Return each group's greedy episode."""
        played = enumerate(group.episodes[0] for group in step.greedily())
        return {"greedy": {g: episode for g, episode in played if episode.error is None}}
