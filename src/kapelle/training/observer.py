"""How a run reports its progress, for example to a terminal panel, plain lines or a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kapelle.rollout.evaluation.evaluate import Evaluation
    from kapelle.training.step_report import Step


REMARKS = ("cache", "environment", "files", "learning", "metrics", "program", "rewards", "tracker", "weights")
"""Phases that are only remarks and do not end the current phase."""


class Observer(Protocol):
    """Observes a run, for example as a terminal panel, plain lines or a test."""

    def phase(self, name: str, detail: str) -> None:
        """A new phase of the run has begun."""
        ...

    def warmup(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """A step of the warm-up is finished."""
        ...

    def step(self, step: Step, steps: int) -> None:
        """A step of training is finished."""
        ...

    def evaluation(self, step: int, result: Evaluation) -> None:
        """An evaluation after `step` steps is finished."""
        ...


class Silent:
    """An observer without output."""

    def phase(self, name: str, detail: str) -> None:
        """Ignore it."""

    def warmup(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Ignore it."""

    def step(self, step: Step, steps: int) -> None:
        """Ignore it."""

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Ignore it."""
