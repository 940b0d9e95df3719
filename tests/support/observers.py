"""Observers that keep what a run reports."""

from __future__ import annotations

from kapelle.training.observer import Silent


class Reported(Silent):
    """Keeps the details of one phase, such as `resume` or `checkpoint`."""

    def __init__(self, phase: str) -> None:
        self.said: list[str] = []
        self._phase = phase

    def phase(self, name: str, detail: str) -> None:
        if name == self._phase:
            self.said.append(detail)
