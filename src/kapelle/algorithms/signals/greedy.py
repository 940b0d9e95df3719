"""One greedy episode per task: a baseline without a critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kapelle.rows import Learners, PlaysAlone, Sampled
from kapelle.types import Episode


@dataclass(frozen=True, slots=True)
class GreedyBaseline(PlaysAlone):
    """Signal that gives `Signals.greedy`; a task whose greedy episode failed is absent."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[int, Episode]]:
        """Return each group's greedy episode."""
        episodes = [group.episodes[0] for group in step.greedily()]
        return {"greedy": {g: episode for g, episode in enumerate(episodes) if episode.error is None}}
