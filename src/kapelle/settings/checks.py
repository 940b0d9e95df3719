"""Types for the checks of a run's settings in combination: the data that a check reads, and the check itself.

Each section's checks are next to its settings, or next to the code that the section builds; `setup/validation.py` lists
the sections.
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
    """A run as described by its settings; no model is loaded."""

    config: RunConfig
    algorithm: Algorithm
    team: Team
    given: Container[str] = ()
    """Paths of models that are already in memory."""
    training: bool = True
    """Whether the run will be trained, which needs the rows and the user's own code."""
    elsewhere: bool = False
    """Whether the run is on another machine, so that no library or device of this machine is needed."""
    absent: list[str] | None = None
    """List to which the things that this machine lacks are added; with None, each of them raises an error."""

    @property
    def unneeded(self) -> tuple[type[KapelleError], ...]:
        """Further errors that are only notes if the run is not trained, because the rows and the user's code are then not needed."""
        return () if self.training else (AbsentCode, DataError)


Check = Callable[[RunToCheck], Iterator[str] | None]
"""Yields each fault, where it is, and how to fix it; or raises ConfigError for the first fault."""
