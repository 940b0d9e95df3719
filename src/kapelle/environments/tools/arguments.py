"""Arguments of a call, checked against the tool's JSON schema before the tool sees them.

Read are `type`, `enum`, `properties`, `required`, `additionalProperties` and `items`; other words of a schema say more
than is checked here, and are the tool's own to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from kapelle.environments.tools.contract import ToolFault
from kapelle.errors import did_you_mean
from kapelle.types import Json

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
    """Return arguments as plain JSON values; ToolFault, naming what is wrong, when they do not fit."""
    fitted = _fit(dict(arguments), {"type": "object", **schema}, "the arguments")
    assert isinstance(fitted, dict), "an object stays one"
    return fitted


def _fit(value: Any, schema: Mapping[str, Json], where: str) -> Json:
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    value = _plain_number(value, kinds or ())
    if kinds and not any(_is(value, kind) for kind in kinds):
        raise ToolFault(f"{where} must be {' or '.join(map(str, kinds))}, not {_named(value)}.")
    if "enum" in schema and value not in schema["enum"]:
        allowed = ", ".join(map(repr, schema["enum"]))
        raise ToolFault(f"{where} must be one of {allowed}, not {value!r:.80}.")
    if isinstance(value, list):
        return [_fit(item, _sub(schema.get("items")), f"item {k} of {where}") for k, item in enumerate(value)]
    if isinstance(value, dict):
        return _fit_object(value, schema, where)
    return value


def _fit_object(value: Mapping[str, Any], schema: Mapping[str, Json], where: str) -> dict[str, Json]:
    known = _sub(schema.get("properties"))
    missing = [name for name in schema.get("required") or () if name not in value]
    if missing:
        raise ToolFault(
            f"{where} lack `{missing[0]}`." if where == "the arguments" else f"{where} lacks `{missing[0]}`."
        )
    if known or schema.get("additionalProperties") is False:
        for name in value:
            if name not in known and not _sub(schema.get("additionalProperties")):
                raise ToolFault(f"There is no argument `{name}`.{did_you_mean(name, known)}")
    return {name: _fit(item, _sub(known.get(name)), f"`{name}`") for name, item in value.items()}


def _sub(schema: Json) -> Mapping[str, Json]:
    return schema if isinstance(schema, Mapping) else {}


def _is(value: object, kind: str) -> bool:
    # True is an int to Python and none to JSON.
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, (object,)))


def _plain_number(value: Any, kinds: object) -> Any:
    """Return a number that was read exactly as the float, or whole number, that a tool expects."""
    if isinstance(value, Decimal):
        whole = value == value.to_integral_value() and abs(value) < 2**53
        return int(value) if whole and "integer" in list(kinds) else float(value)  # type: ignore[call-overload]
    return value


def _named(value: object) -> str:
    names = [name for name in _TYPES if _is(value, name)]
    return names[0] if names else type(value).__name__
