"""The checks of a run's settings in combination: what they read, and what they are.

Each section's checks stand beside its settings, or beside what the section builds; `setup/validation.py` lists the sections.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from kapelle.algorithm import Algorithm
from kapelle.errors import AbsentCode, DataError, KapelleError
from kapelle.settings.schema import RunConfig
from kapelle.team import Team


@dataclass(frozen=True, slots=True)
class RunToCheck:
    """A run as its settings describe it; no model is loaded."""

    config: RunConfig
    algorithm: Algorithm
    team: Team
    given: Container[str] = ()
    """Paths of models that are in memory already."""
    training: bool = True
    """Whether it is to be trained, which needs the rows and the user's own code."""
    elsewhere: bool = False
    """Whether it runs on another machine: no library or device of this one is needed."""
    absent: list[str] | None = None
    """List to which things that this machine lacks are added; None raises an error for them."""

    @property
    def unneeded(self) -> tuple[type[KapelleError], ...]:
        """Further errors that are only notes without training, which needs neither its rows nor the user's code."""
        return () if self.training else (AbsentCode, DataError)


Check = Callable[[RunToCheck], Iterator[str] | None]
"""Yields each fault, its place, and how to fix it; or raises ConfigError for the first fault."""
