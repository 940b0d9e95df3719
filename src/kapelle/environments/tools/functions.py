"""Typed Python functions as tools. The schema is derived from the function's signature, and the description from its docstring."""

from __future__ import annotations

import asyncio
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from kapelle.environments.tools.contract import Tool, Toolbox, ToolFault, ToolSchema, ToolSettings
from kapelle.errors import ConfigError
from kapelle.runtime.plugins import IN_MEMORY, find_object
from kapelle.types import Json

_NAMES: Mapping[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


class Functions(ToolSettings):
    """Settings of tools that are the user's own Python functions, which run in this process with its permissions."""

    tool: Literal["functions"] = "functions"
    functions: tuple[str, ...] = Field(min_length=1)
    """The functions, each written as `module:function` or `path/file.py:function`. The code of the functions must be trusted; an agent
    chooses only the arguments."""
    _held: Mapping[str, Callable[..., Any]] = PrivateAttr(default_factory=dict)

    @property
    def held(self) -> Sequence[str]:
        """The names of the functions that exist only in this process."""
        return [name.partition(":")[2] for name in self.functions if name.startswith(f"{IN_MEMORY}:")]

    def check(self) -> None:
        """Import the functions. Raises ConfigError if a function is missing or an argument has an unsupported type."""
        self.schemas()

    def open(self) -> Toolbox:
        """Return the functions as tools. The state of the functions is shared by all episodes."""
        return Toolbox(*self._tools)

    @cached_property
    def _tools(self) -> Sequence[Tool]:
        return [function_tool(find_object(name, "tool", held=self._held)) for name in self.functions]

    def holding(self, held: Mapping[str, Callable[..., Any]]) -> Functions:
        """Set the functions to which names such as `in-memory:name` refer, and return these settings."""
        self._held = held
        return self


def function_tool(function: Callable[..., Any]) -> Tool:
    """Return a function as a tool. Raises ConfigError if no schema can be derived from the function's signature.

    The first paragraph of the docstring is the description of the tool, and its section `Args:` describes the arguments. A
    coroutine function is supported; its result is awaited.
    """
    if not inspect.isroutine(function):
        raise ConfigError(
            f"The tool {function!r:.60} is {type(function).__name__}, not a function. Use a function."
        )
    try:
        hints = typing.get_type_hints(function)
    except (NameError, AttributeError) as error:
        raise ConfigError(
            f"The tool '{function.__name__}' has an unknown annotation: {error}. Import it in the function's module."
        ) from error
    doc = inspect.getdoc(function) or ""
    meanings = _meanings(doc)
    properties: dict[str, Json] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}:
            raise ConfigError(
                f"The tool '{function.__name__}' has the argument `{name}`, which cannot be passed by name. Make it a keyword argument."
            )
        if name not in hints:
            raise ConfigError(f"The tool '{function.__name__}' has no type for `{name}`. Annotate it.")
        properties[name] = _schema(hints[name], function.__name__, name)
        if name in meanings:
            properties[name]["description"] = meanings[name]
        if parameter.default is parameter.empty:
            required.append(name)
        elif isinstance(parameter.default, str | int | float | bool | None):
            properties[name] = {**properties[name], "default": parameter.default}
    description = doc.partition("\n\n")[0].replace("\n", " ")
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(ToolSchema(function.__name__, description, parameters), lambda given: _call(function, given))


def _meanings(doc: str) -> dict[str, str]:
    """Return the description of each argument in the section `Args:` of a docstring in Google style."""
    section = re.search(r"^Arg(?:ument)?s:\n((?:[ \t]+.*\n?|\n)+)", doc, re.MULTILINE)
    body = inspect.cleandoc(f"\n{section[1]}") if section else ""
    found = re.findall(r"^(\w+)[^:\n]*:((?:.*)(?:\n[ \t]+.*)*)", body, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}


def _schema(hint: object, function: str, name: str) -> dict[str, Json]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _NAMES:
        return {"type": _NAMES[hint]}
    if hint is Any:
        return {}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is list and arguments:
        return {"type": "array", "items": _schema(arguments[0], function, name)}
    if origin is dict and arguments and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema(arguments[1], function, name)}
    if origin in {typing.Union, types.UnionType}:
        kinds = [_schema(argument, function, name) for argument in arguments]
        if {} in kinds:
            return {}  # any JSON value
        more = {key: value for kind in kinds for key, value in kind.items() if key != "type"}
        if "enum" in more and len(kinds) == 2 and type(None) in arguments:
            return {"enum": [*more["enum"], None]}
        if not more or (len(kinds) == 2 and type(None) in arguments):
            return {**more, "type": [kind["type"] for kind in kinds]}
    raise ConfigError(
        f"The tool '{function}' has an argument `{name}` of type {hint}, which is not supported. Use str, int, float, bool, "
        "Literal, list, dict with string keys, or one of these types or None."
    )


def _call(function: Callable[..., Any], arguments: Mapping[str, Json]) -> str:
    try:
        result = function(**arguments)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)  # calls run in threads
    except ToolFault:
        raise
    # This is the boundary to a tool's own code: any error becomes a message for the agent.
    except Exception as error:
        raise ToolFault(f"{type(error).__name__}: {error}") from error
    return result if isinstance(result, str) else repr(result)
