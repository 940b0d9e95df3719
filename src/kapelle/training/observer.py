"""How a run reports its progress: to the terminal panel, plain lines, a test."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from kapelle.setup.preparation import rows_left_out

if TYPE_CHECKING:
    from kapelle.evaluation.evaluate import Evaluation
    from kapelle.settings.schema import RunConfig
    from kapelle.training.loop import Step


REMARKS = ("cache", "environment", "files", "learning", "metrics", "program", "tracker")
"""What is said during a phase, which goes on."""


class Observer(Protocol):
    """Watches a run: a terminal panel, plain lines, a test."""

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
    """An observer that shows nothing."""

    def phase(self, name: str, detail: str) -> None:
        """Ignore it."""

    def warmup(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Ignore it."""

    def step(self, step: Step, steps: int) -> None:
        """Ignore it."""

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Ignore it."""


def report_notes(notes: Sequence[str], observer: Observer | None) -> None:
    """Report notes on a recipe to the observer; without one each note is a Python warning."""
    for note in notes:
        if observer is None:
            warnings.warn(note, stacklevel=3)
        else:
            observer.phase("recipe", note)


def report_left_out(config: RunConfig, observer: Observer) -> None:
    """Report the rows of data that a run leaves out."""
    for line in rows_left_out(config):
        observer.phase("data", line)
