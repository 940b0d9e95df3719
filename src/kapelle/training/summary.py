"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass

from kapelle.evaluation.evaluate import Evaluation


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a run."""

    steps: int
    """Steps behind the weights."""
    before: Evaluation | None
    after: Evaluation | None
    stopped_by: int
    """0, or the exit code of the signal that stopped it (130, 143)."""
    went_back: bool = False
    """True if an interrupted update could not be undone: steps since the last checkpoint are repeated."""
