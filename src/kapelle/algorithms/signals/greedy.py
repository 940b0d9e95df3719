"""Sample one greedy episode per task, whose return is a baseline without a critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kapelle.rows import Learners, PlaysAlone, Sampled
from kapelle.types import Episode


@dataclass(frozen=True, slots=True)
class GreedyBaseline(PlaysAlone):
    """A signal that provides `Signals.greedy`. Tasks whose greedy episode failed are not included."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[int, Episode]]:
        """Return the greedy episode of each group."""
        episodes = [group.episodes[0] for group in step.greedily()]
        return {"greedy": {g: episode for g, episode in enumerate(episodes) if episode.error is None}}
