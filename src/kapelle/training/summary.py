"""The result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kapelle.evaluation.evaluate import Evaluation
from kapelle.runs.summary import in_words, telling
from kapelle.types import as_table


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a run; `print` shows it in five lines."""

    steps: int
    """Steps behind the weights."""
    before: Evaluation | None
    after: Evaluation | None
    stopped_by: int
    """0, or the exit code of the signal that stopped it (130, 143)."""
    went_back: bool = False
    """True if an interrupted update could not be undone: steps since the last checkpoint are repeated."""
    seconds: float = 0.0
    """Wall time of this call, evaluations included."""
    run_dir: Path | None = None
    """Where the run is kept; None where nothing was written."""
    last: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last step that this call has taken; empty where it took none."""
    idle: str = ""
    """Why that step had nothing to learn from; empty where it had."""

    def __str__(self) -> str:
        """Return steps, the evaluations before and after, the last step's metrics, and where the run is kept."""
        ended = f"stopped, exit code {self.stopped_by}" if self.stopped_by else "done"
        lines = {
            "steps": f"{self.steps}, {ended}, {self.seconds:.1f} s",
            "before": "not measured" if self.before is None else str(self.before),
            "after": "not measured" if self.after is None else str(self.after),
            "last step": self._last_step(),
            "run": "not kept: name a `run_dir` to keep it" if self.run_dir is None else str(self.run_dir),
        }
        return "\n".join(f"{name:11}{text}" for name, text in lines.items())

    def _last_step(self) -> str:
        if not self.last:
            return "none taken"
        parts = [f"nothing to learn from: {self.idle}"] if self.idle else []
        return "  ".join([*parts, in_words(telling(self.last))]).rstrip()

    def _repr_html_(self) -> str:
        """Return the result as a table, for notebooks."""
        measured = [
            (name, str(each)) for name, each in (("before", self.before), ("after", self.after)) if each
        ]
        stopped = [("stopped by signal", f"exit code {self.stopped_by}")] if self.stopped_by else []
        return as_table([("steps", str(self.steps)), *measured, *stopped])
