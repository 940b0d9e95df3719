"""The interface through which a run reports its progress, for example to a terminal panel, to a plain view or to a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kapelle.rollout.evaluation.evaluate import Evaluation
    from kapelle.training.step_report import Step


REMARKS = ("cache", "environment", "files", "learning", "metrics", "program", "rewards", "tracker", "weights")
"""The names of phases that are only remarks and do not end the current phase."""


class Observer(Protocol):
    """An object that receives the progress of a run, for example to display it in a terminal."""

    def phase(self, name: str, detail: str) -> None:
        """Receive the start of a new phase of the run."""
        ...

    def warmup(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Receive a finished step of the warm-up."""
        ...

    def step(self, step: Step, steps: int) -> None:
        """Receive a finished training step."""
        ...

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Receive the result of an evaluation after `step` steps."""
        ...


class Silent:
    """An observer without output."""

    def phase(self, name: str, detail: str) -> None:
        """Ignore the event."""

    def warmup(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Ignore the event."""

    def step(self, step: Step, steps: int) -> None:
        """Ignore the event."""

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Ignore the event."""
