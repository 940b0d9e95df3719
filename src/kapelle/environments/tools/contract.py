"""What a tool is: a name, a schema, and a function from arguments to a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kapelle.types import Json


class ToolFault(Exception):
    """A call that could not be carried out; its text is what the agent reads."""


class Lost(ToolFault):
    """The server behind a tool cannot be spoken to any more."""


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """What an agent reads about a tool."""

    name: str
    description: str
    parameters: Mapping[str, Json]
    """JSON schema of an object: `{"type": "object", "properties": {…}, "required": […]}`."""

    def as_json(self) -> Json:
        """Return the form in which models know schemas."""
        return {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}


def one_text(name: str, description: str, argument: str, meaning: str | None = None) -> ToolSchema:
    """Return the schema of a tool that takes one text, the argument of that name."""
    told: dict[str, Json] = {} if meaning is None else {"description": meaning}
    properties: Json = {argument: {"type": "string", **told}}
    return ToolSchema(name, description, {"type": "object", "properties": properties, "required": [argument]})


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that can be called."""

    schema: ToolSchema
    call: Callable[[Mapping[str, Json]], str]
    """Takes arguments that fit the schema; may block, is called in a thread; ToolFault for the agent."""


class Box(Protocol):
    """The tools of one agent in one episode, with the state that they share."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools."""
        ...

    def close(self) -> None:
        """Free what they hold; may be called again."""
        ...


class ToolSettings(Protocol):
    """One entry of the setting `tools`."""

    def check(self) -> None:
        """Raise ConfigError, DataError or SandboxError when the tools cannot be had here."""
        ...

    def schemas(self) -> tuple[ToolSchema, ...]:
        """Return the schemas that agents read; the same in every episode."""
        ...

    def open(self) -> Box:
        """Return fresh tools for one agent in one episode; what is costly starts with the first call."""
        ...


@dataclass(frozen=True, slots=True)
class PlainBox:
    """Tools without state."""

    tools: tuple[Tool, ...]

    def close(self) -> None:
        """Hold nothing."""
