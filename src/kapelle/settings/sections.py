"""Types of a run's sections: settings of a plug-in, together with what the plug-in can do.

A section (`environment`, `workflow`, `algorithm`) holds settings of the class that its `name` finds. Its type covers
both: it is settings, and it is an environment, a workflow, or a builder of an algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

from pydantic import GetCoreSchemaHandler, SerializeAsAny

from kapelle.algorithm import Algorithm
from kapelle.environment import Environment
from kapelle.settings.base import Settings
from kapelle.workflow import Workflow

if TYPE_CHECKING:
    from pydantic_core import CoreSchema


class Section(Protocol):
    """Settings of any plug-in."""

    @property
    def name(self) -> str:
        """The name by which its class is found; a settings field."""
        ...

    def model_dump(self, *, mode: str = "python", exclude: Any = None) -> dict[str, Any]:
        """Return the settings as plain values, without those in `exclude`."""
        ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """Return the same settings with some of them replaced."""
        ...


class EnvironmentSettings(Section, Environment, Protocol):
    """The section `environment`."""


class WorkflowSettings(Section, Workflow, Protocol):
    """The section `workflow`."""


class AlgorithmSettings(Section, Protocol):
    """The section `algorithm`."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        ...


class Plugged:
    """Marks a field whose type states what a plug-in can do: it holds any `Settings` and is written with all their fields."""

    def __get_pydantic_core_schema__(self, _source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return how pydantic validates and writes the field."""
        return handler.generate_schema(SerializeAsAny[Settings])
