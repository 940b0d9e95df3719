"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass

from kapelle.evaluation.evaluate import Evaluation
from kapelle.types import as_table


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

    def _repr_html_(self) -> str:
        """Return the result as a table, for notebooks."""
        measured = [
            (name, str(each)) for name, each in (("before", self.before), ("after", self.after)) if each
        ]
        stopped = [("stopped by signal", f"exit code {self.stopped_by}")] if self.stopped_by else []
        return as_table([("steps", str(self.steps)), *measured, *stopped])
