"""What a run came to."""

from __future__ import annotations

from dataclasses import dataclass

from kapelle.evaluation.evaluate import Evaluation


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to."""

    steps: int
    """Steps behind the weights."""
    before: Evaluation | None
    after: Evaluation | None
    stopped_by: int
    """0, or the exit code of the signal that stopped it (130, 143)."""
    went_back: bool = False
    """True when a stop fell into an update that could not be taken back: steps since the last checkpoint are done again."""
