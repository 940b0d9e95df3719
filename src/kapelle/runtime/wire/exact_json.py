"""Encode values as JSON so that decoding returns the same value with the same type.

Values that JSON can represent are not changed. A value that JSON cannot represent is encoded as an object with a tag as its only key:

    {"$tuple": [1, 2]}        a tuple
    {"$float": "nan"}         nan, inf or -inf
    {"$items": [[1, "a"]]}    a mapping with a key that is not a string or starts with `$`

Callers that store other types, such as tensors, define additional tags.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from kapelle.types import Json

Encode = Callable[[object, str], Json | None]
"""Function that takes a value that JSON cannot represent and the position of the value. The function returns the tagged form of the
value, or None if the type is unknown."""
Decode = Callable[[str, Json], object]
"""Function that takes an unknown tag and its content, and returns the decoded value."""


def encode(value: object, place: str, foreign: Encode | None = None) -> Json:
    """Return a value as tagged JSON.

    Raises TypeError if the value cannot be encoded. The argument `place` is the position of the value in the error message, such as
    `info.answer`.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(inner, f"{place}.{key}", foreign) for key, inner in value.items()}
        pairs = value.items()
        return {"$items": [[encode(k, place, foreign), encode(v, f"{place}.{k}", foreign)] for k, v in pairs]}
    if isinstance(value, list | tuple):
        items = [encode(inner, f"{place}.{index}", foreign) for index, inner in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    tagged = foreign(value, place) if foreign is not None else None
    if tagged is None:
        raise TypeError(f"{place} is a {type(value).__name__}, which JSON cannot represent")
    return tagged


def decode(value: Json, foreign: Decode | None = None) -> Any:
    """Return the value that was encoded as tagged JSON. Raises ValueError if a tag is unknown."""
    if isinstance(value, list):
        return [decode(inner, foreign) for inner in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(inner, foreign) for key, inner in value.items()}
    inner = value[tag]
    if tag == "$tuple":
        return tuple(decode(item, foreign) for item in inner)
    if tag == "$float":
        return float(inner)
    if tag == "$items":
        return {decode(key, foreign): decode(item, foreign) for key, item in inner}
    if foreign is None:
        raise ValueError(f"unknown tag '{tag}'")
    return foreign(tag, inner)
