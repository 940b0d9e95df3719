"""Typed Python functions as tools: the schema is the signature, the description the docstring's first paragraph."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field

from kapelle.environments.tools.contract import Tool, Toolbox, ToolFault, ToolSchema, ToolSettings
from kapelle.errors import ConfigError
from kapelle.runtime.plugins import find_object
from kapelle.types import Json

_NAMES: Mapping[object, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


class Functions(ToolSettings):
    """Functions of your own; they run in this process, with its rights."""

    tool: Literal["functions"] = "functions"
    functions: tuple[str, ...] = Field(min_length=1)
    """Each as `module:function` or `path/file.py:function`. They are trusted code: an agent chooses only the arguments."""

    def check(self) -> None:
        """Import them; ConfigError for a missing function or an argument without a known type."""
        self.schemas()

    def open(self) -> Toolbox:
        """Return the functions; what they remember they share between episodes."""
        return Toolbox(*map(_tool, self.functions))


def _tool(target: str) -> Tool:
    found = find_object(target, "tool")
    if not inspect.isfunction(found):
        raise ConfigError(
            f"The tool '{target}' is no function but {type(found).__name__}. Name a function, as `module:function` or `path/file.py:function`."
        )
    return function_tool(found)


def function_tool(function: Callable[..., Any]) -> Tool:
    """Return a function as a tool; ConfigError if its signature is insufficient for a schema."""
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"The tool '{function.__name__}' is a coroutine. Write a plain function: calls run in threads."
        )
    hints = typing.get_type_hints(function)
    properties: dict[str, Json] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}:
            raise ConfigError(
                f"The tool '{function.__name__}' takes `{name}` by position or in a bundle. Name it."
            )
        if name not in hints:
            raise ConfigError(
                f"The tool '{function.__name__}' does not say the type of `{name}`. Annotate it."
            )
        properties[name] = _schema(hints[name], function.__name__, name)
        if parameter.default is parameter.empty:
            required.append(name)
        elif isinstance(parameter.default, str | int | float | bool | None):
            properties[name] = {**properties[name], "default": parameter.default}
    description = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(
        ToolSchema(function.__name__, description, parameters), lambda given: _called(function, given)
    )


def _schema(hint: object, function: str, name: str) -> dict[str, Json]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _NAMES:
        return {"type": _NAMES[hint]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is list and arguments:
        return {"type": "array", "items": _schema(arguments[0], function, name)}
    if origin is dict and arguments and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema(arguments[1], function, name)}
    if origin in {typing.Union, types.UnionType}:
        others = [argument for argument in arguments if argument is not type(None)]
        if len(others) == 1 and len(arguments) == 2 and others[0] in _NAMES:
            return {"type": [_NAMES[others[0]], "null"]}
    raise ConfigError(
        f"The tool '{function}' has an argument `{name}` of type {hint}, which has no JSON schema. Use str, int, "
        "float, bool, Literal, list, dict with text keys, or one of the first four with None."
    )


def _called(function: Callable[..., Any], given: Mapping[str, Json]) -> str:
    try:
        result = function(**given)
    except ToolFault:
        raise
    # The boundary to a tool's own code: whatever it raises is an answer to the agent, never a crash.
    except Exception as error:
        raise ToolFault(f"{type(error).__name__}: {error}") from error
    return result if isinstance(result, str) else repr(result)
