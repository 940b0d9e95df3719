"""The interface of tools. A tool has a name, a schema, and a function that takes arguments and returns a string."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from kapelle.environments.grading.text.tool_call import Form, ReadCall, write_calls
from kapelle.errors import did_you_mean
from kapelle.settings.base import Settings
from kapelle.types import Json


class ToolFault(Exception):
    """Raised if a tool call fails. The agent reads the message."""


class Lost(ToolFault):
    """Raised if the connection to the server of a tool is lost. The user, but not the agent, can read `stderr`."""

    def __init__(self, why: str, stderr: str = "") -> None:
        super().__init__(why)
        self.stderr = stderr
        """The end of the server's standard error output."""


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """The description of a tool that agents read."""

    name: str
    description: str
    parameters: Mapping[str, Json]
    """The JSON schema of the arguments, which describes an object with `properties` and `required`."""

    def as_json(self) -> Json:
        """Return the schema in the JSON format that models know from training."""
        return {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}


def one_text(name: str, description: str, argument: str, meaning: str | None = None) -> ToolSchema:
    """Return the schema of a tool with a single string argument."""
    description_of = {} if meaning is None else {"description": meaning}
    properties: Json = {argument: {"type": "string", **description_of}}
    return ToolSchema(name, description, {"type": "object", "properties": properties, "required": [argument]})


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool with its schema and its function."""

    schema: ToolSchema
    call: Callable[[Mapping[str, Json]], str]
    """A function that takes arguments that fit the schema. The function runs in a thread and may block. To send an error message to
    the agent, the function raises ToolFault."""


class Toolbox:
    """The tools of one agent in one episode, with the state that they share."""

    def __init__(self, *tools: Tool) -> None:
        self.tools = tools

    def close(self) -> None:
        """Release the resources of the tools. Repeated calls have no effect. The default implementation does nothing."""


class ToolSettings(Settings):
    """Base class of the entries in `environment.tools`."""

    def check(self) -> None:
        """Raise ConfigError, DataError or SandboxError if the tools are unavailable on this machine."""

    def schemas(self) -> tuple[ToolSchema, ...]:
        """Return the schemas of the tools, which are the same in every episode."""
        return tuple(tool.schema for tool in self.open().tools)

    @abstractmethod
    def open(self) -> Toolbox:
        """Return the tools of one agent for one episode. Expensive resources are started by the first call of a tool."""


# -------- Arguments of a call, checked against the tool's JSON schema before the call
#
# This checks `type`, `enum`, `properties`, `required`, `additionalProperties` and `items`. The tool checks everything else.

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def fit_arguments(arguments: Mapping[str, Json], schema: Mapping[str, Json]) -> dict[str, Json]:
    """Return the arguments as plain JSON values. Raises ToolFault if they violate the schema."""
    fitted = _fit(dict(arguments), {"type": "object", **schema}, "the arguments")
    assert isinstance(fitted, dict), "an object stays an object"
    return fitted


def _fit(value: Any, schema: Mapping[str, Json], where: str) -> Json:
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(value, Decimal):
        # Numbers in calls are parsed exactly. A tool expects a float, or an integer that a float represents exactly.
        whole = value == value.to_integral_value() and abs(value) < 2**53
        value = int(value) if whole and "integer" in list(kinds or ()) else float(value)
    if kinds and not any(_is(value, kind) for kind in kinds):
        found = next((name for name in _TYPES if _is(value, name)), type(value).__name__)
        raise ToolFault(f"{where} must be {' or '.join(map(str, kinds))}, not {found}.")
    if "enum" in schema and value not in schema["enum"]:
        allowed = ", ".join(map(repr, schema["enum"]))
        raise ToolFault(f"{where} must be one of {allowed}, not {value!r:.80}.")
    if isinstance(value, list):
        return [_fit(item, _sub(schema.get("items")), f"item {k} of {where}") for k, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    known = _sub(schema.get("properties"))
    missing = [name for name in schema.get("required") or () if name not in value]
    if missing:
        lack = "lack" if where == "the arguments" else "lacks"
        raise ToolFault(f"{where} {lack} `{missing[0]}`.")
    if known or schema.get("additionalProperties") is False:
        for name in value:
            if name not in known and not _sub(schema.get("additionalProperties")):
                raise ToolFault(f"There is no argument `{name}`.{did_you_mean(name, known)}")
    return {name: _fit(item, _sub(known.get(name)), f"`{name}`") for name, item in value.items()}


def _sub(schema: Json) -> Mapping[str, Json]:
    return schema if isinstance(schema, Mapping) else {}


def _is(value: object, kind: str) -> bool:
    # In Python, True is an int; in JSON, it is not.
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, (object,)))


# -------- The prompt about tools: their schemas, and the format of a call

_HOW: Mapping[Form, str] = {
    "hermes": "Write each call on lines of its own, and nothing but calls when you make one:",
    "llama": "To call a tool, answer with this object and nothing else; several calls are a list of them:",
    "pythonic": "To call tools, answer with a list of calls and nothing else; every argument is named:",
    "mistral": "To call tools, end your answer with a list of calls:",
    "deepseek": "To call tools, end your answer with the calls, each between the marks of one:",
    "glm": "Write each call on lines of its own, every argument as a key and a value:",
    "qwen_coder": "Write each call on lines of its own, and each argument between lines of its own:",
    "harmony": "Call a tool by a message to it in the commentary channel:",
}


def _example(form: Form, name: str) -> str:
    """Return an example of a tool call in the given format."""
    if form == "pythonic":
        return f'{name}(argument="value")'
    return write_calls([ReadCall(name, {"argument": "value"})], form)


Listing = Literal["schemas", "signatures"]
"""How tools are described in a prompt. `schemas`: the JSON schema of each tool and a paragraph about calls. `signatures`: one line per
tool and an example of a call."""


def signatures_prompt(schemas: Sequence[Json], form: Form) -> str:
    """Return a short prompt with a signature of each tool, such as `move_event(number, start, minutes=)`, and an example of a call."""
    lines = []
    for schema in schemas:
        needed = schema["parameters"].get("required") or ()
        named = [
            name if name in needed else f"{name}=" for name in schema["parameters"].get("properties", {})
        ]
        lines.append(f"{schema['name']}({', '.join(named)})")
    example = _example(form, "tool")
    shorter = {"hermes": example.replace("\n", ""), "pythonic": f"[{example}]"}
    return "\n".join([*lines, shorter.get(form, example)])


def tools_prompt(schemas: Sequence[Json], form: Form) -> str:
    """Return a prompt with the JSON schema of each tool and an explanation of how to call tools."""
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    example = _example(form, "tool_name" if form in ("pythonic", "harmony") else "tool name")
    if form == "pythonic":
        example = f"[{example}, other_tool(argument=1)]"
    return f"You can call these tools:\n<tools>\n{listed}\n</tools>\n{_HOW[form]}\n{example}"
