"""Whoever watches a run hears of it here: the terminal panel, plain lines, a test."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from kapelle.former_names import renamed_in

if TYPE_CHECKING:
    from kapelle.evaluation.evaluate import Evaluation
    from kapelle.training.loop import Step


class Observer(Protocol):
    """Whoever watches a run: a terminal panel, plain lines, a test."""

    def phase(self, name: str, detail: str) -> None:
        """Hear that the run does something else now."""
        ...

    def warmup(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Hear of a step of the warm-up."""
        ...

    def step(self, step: Step, steps: int) -> None:
        """Hear of a step of training."""
        ...

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Hear of an evaluation after `step` steps."""
        ...


class Silent:
    """A observer that says nothing."""

    def phase(self, name: str, detail: str) -> None:
        """Ignore it."""

    def warmup(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Ignore it."""

    def step(self, step: Step, steps: int) -> None:
        """Ignore it."""

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Ignore it."""


def tell_notes(notes: Sequence[str], observer: Observer | None) -> None:
    """Let the observer hear what is to be known of a recipe; without one each note is a warning of Python's."""
    for note in notes:
        if observer is None:
            warnings.warn(note, stacklevel=3)
        else:
            observer.phase("recipe", note)


__getattr__ = renamed_in(__name__)
