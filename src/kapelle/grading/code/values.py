"""Python values as strict JSON: what candidates and tests say to each other.

`None`, booleans and strings stand for themselves; everything else is an object with one key, its type:

    {"int": "-7"}  {"float": "0x1.8p+1"}  {"complex": ["0x0p+0", "inf"]}  {"bytes": "00ff"}
    {"list": [..]}  {"tuple": [..]}  {"set": [..]}  {"frozenset": [..]}  {"dict": [[key, value], ..]}
    {"type": "int"}: one of the built-in types themselves
    {"object": "3"}: a value that stays in the candidate's process, by number

Nothing else is read: no bare numbers, no NaN literal, no second key. What is decoded is always of a built-in
type, so that no method of the candidate's can run where its answers are compared. Standard library only: the
file is copied into sandboxes as it stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

MAX_TEXT = 1_000_000
"""Characters of one message."""
MAX_DIGITS = 4300
"""Digits of one integer; longer ones take quadratic time to read."""
MAX_HASHED = 20_000
"""Elements of one set or dictionary: their hashes can be chosen to collide."""
MAX_DEPTH = 200


class ValueFault(Exception):
    """A text that is not a value in this encoding, or a value that has none."""


# Plain classes: `dataclasses` would double the start of the small interpreters that import this.
class Reference:
    """A value that stays in the candidate's process."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __repr__(self) -> str:
        return f"Reference({self.number})"


Plain = Any
"""A value of built-in types, with references where objects stay behind."""


def encode(value: Plain, refer: Callable[[Any], int] | None = None) -> str:
    """Return a value's text; `refer` gives the number of an object that has no encoding.

    Raises ValueFault where there is no `refer`, and for values that are too large or too deep.
    """
    try:
        text = json.dumps(_pack(value, refer, 0), separators=(",", ":"))
    except (RecursionError, ValueError, OverflowError) as error:
        raise ValueFault(f"a value that cannot be sent: {error}") from None
    if len(text) > MAX_TEXT:
        raise ValueFault(f"a value of {len(text):,} characters; the most is {MAX_TEXT:,}")
    return text


def decode(text: str | bytes) -> Plain:
    """Return the value of a text. Raises ValueFault for anything that `encode` would not write."""
    if len(text) > MAX_TEXT:
        raise ValueFault(f"a message of {len(text):,} characters; the most is {MAX_TEXT:,}")
    try:
        tree = json.loads(
            text, parse_int=_refuse, parse_float=_refuse, parse_constant=_refuse, object_pairs_hook=_one_key
        )
        return _unpack(tree, 0)
    except RecursionError:
        raise ValueFault("a message nested too deeply") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueFault(f"a message that is not in the encoding: {str(error)[:200]}") from None


def _pack(value: Plain, refer: Callable[[Any], int] | None, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueFault("a value nested too deeply")
    if value is None or isinstance(value, bool):
        return value
    for kind, write in _WRITERS:
        if isinstance(value, kind):
            return write(value)
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [_pack(item, refer, depth + 1) for item in value]}
    if isinstance(value, dict):
        pairs = dict.items(value)
        return {"dict": [[_pack(k, refer, depth + 1), _pack(v, refer, depth + 1)] for k, v in pairs]}
    if type(value) is type and value in _TYPE_NAMES:
        return {"type": _TYPE_NAMES[value]}
    if refer is None:
        raise ValueFault(f"a value of type {type(value).__name__}, which has no encoding")
    return {"object": str(refer(value))}


def _unpack(tree: Any, depth: int) -> Plain:
    if depth > MAX_DEPTH:
        raise ValueFault("a message nested too deeply")
    if tree is None or isinstance(tree, (bool, str)):
        return tree
    if not isinstance(tree, _Tagged):
        raise ValueFault("a list without its type")
    name, content = tree.name, tree.content
    if name in _SCALARS:
        return _SCALARS[name](_expect(content, str))
    if name == "complex":
        real, imaginary = (float.fromhex(_expect(part, str)) for part in _expect(content, list))
        return complex(real, imaginary)
    items = _expect(content, list)
    if name in _HASHED and len(items) > MAX_HASHED:
        raise ValueFault(f"a {name} of {len(items):,} elements; the most is {MAX_HASHED:,}")
    if name == "dict":
        pairs = [[_unpack(part, depth + 1) for part in _expect(pair, list)] for pair in items]
        return {key: value for key, value in pairs}  # noqa: C416 (checks that each is a pair)
    if name not in _SEQUENCES:
        raise ValueFault(f"the unknown type {name[:20]!r}")
    return _SEQUENCES[name](_unpack(item, depth + 1) for item in items)


def _integer(text: str) -> int:
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > MAX_DIGITS:
        raise ValueFault("an integer that is not plain decimal digits, or has too many")
    return int(text)


def _type(text: str) -> type:
    if text not in _TYPES:
        raise ValueFault(f"the unknown type {text[:20]!r}")
    return _TYPES[text]


def _reference(text: str) -> Reference:
    return Reference(_integer(text))


_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, object, type(None))
}
_TYPE_NAMES: dict[Any, str] = {kind: name for name, kind in _TYPES.items()}
# A subclass is written as the type it derives from: that is all that can be compared outside.
_WRITERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, lambda value: {"int": int.__repr__(value)}),
    (float, lambda value: {"float": float.hex(value)}),
    (complex, lambda value: {"complex": [value.real.hex(), value.imag.hex()]}),
    (bytes, lambda value: {"bytes": value.hex()}),
    (bytearray, lambda value: {"bytes": value.hex()}),
    (Reference, lambda value: {"object": str(value.number)}),
)
_SCALARS: dict[str, Callable[[str], Any]] = {
    "int": _integer,
    "float": float.fromhex,
    "bytes": bytes.fromhex,
    "type": _type,
    "object": _reference,
}
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_HASHED = {"set", "frozenset", "dict"}


class _Tagged:
    __slots__ = ("content", "name")

    def __init__(self, name: str, content: Any) -> None:
        self.name = name
        self.content = content


def _one_key(pairs: list[tuple[str, Any]]) -> _Tagged:
    if len(pairs) != 1:
        raise ValueFault("an object that does not have exactly one key")
    return _Tagged(*pairs[0])


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueFault(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _refuse(text: str) -> NoReturn:
    raise ValueFault(f"the bare number {text[:20]}")
