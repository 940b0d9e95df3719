"""Types for checks that involve several settings of a run: the data that a check reads, and the check itself.

The checks of a section are defined next to its settings, or next to the code that the section configures. The module
`setup/validation.py` lists the sections.
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
    """A run as described by its settings, before any model is loaded."""

    config: RunConfig
    algorithm: Algorithm
    team: Team
    given: Container[str] = ()
    """The paths of the models that are already in memory."""
    training: bool = True
    """Whether the run will be trained, which requires the dataset rows and the user's own code."""
    elsewhere: bool = False
    """Whether the run will be on another machine. If true, the libraries and devices of this machine are not checked."""
    absent: list[str] | None = None
    """The list to which the names of missing libraries and devices are added; with None, an error is raised instead."""

    @property
    def unneeded(self) -> tuple[type[KapelleError], ...]:
        """The additional errors that are only noted if the run is not trained, because the rows and the user's code are then not needed."""
        return () if self.training else (AbsentCode, DataError)


Check = Callable[[RunToCheck], Iterator[str] | None]
"""A check yields a message for each error (what is wrong, where, and how to fix it), or raises ConfigError for the first error."""
