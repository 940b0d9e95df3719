"""Encode Python values as strict JSON, for messages between the process of a candidate and the grader.

`null`, booleans, strings, finite floats and integers of at most 18 digits are plain JSON. Any other value is a list that
contains its kind and its parts:

    ["list", part, ..]  ["tuple", ..]  ["set", ..]  ["frozenset", ..]  ["dict", key, value, ..]  ["counter", ..]  ["deque", ..]
    ["keys", key, ..]  ["values", ..]  ["items", key, value, ..]  ["int", "-0xff"]  ["float", "nan"]  ["complex", 0.0, 1.0]
    ["bytes", "00ff"]  ["bytearray", "00ff"]  ["range", "0", "9", "1"]  ["fraction", "1", "3"]  ["decimal", "0.10"]
    ["date", "2024-02-29"]  ["datetime", ..]  ["time", ..]  ["timedelta", 1, 0, 5]  ["type", "int"]: a built-in type
    ["object", number, nature]: an object that stays in the candidate's process

`decode` returns only values of built-in types and of types of the standard library, so no method of a candidate's class runs in
the process that compares the values. This file uses only the standard library, because it is copied into sandboxes unchanged.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import fractions
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

MAX_TEXT = 16_000_000
"""Maximum number of characters in a message."""
MAX_PARTS = 1_000_000
"""Maximum number of parts in an encoded value."""
MAX_DEPTH = 200
"""Maximum depth of nested lists. Python's parser has the same limit for literals."""
MAX_BITS = 400_000
"""Maximum number of bits of an integer. The limit exists because arithmetic on longer integers would take seconds."""
MAX_COLLIDING = 50
"""Maximum number of elements with the same hash in a set or dictionary. A candidate could choose such elements to make lookups
slow."""
MAX_EXPONENT = 6000
"""Maximum absolute value of the exponent of a decimal number."""

Plain = Any
"""A value of a built-in type or of one of the types of the standard library that the module documentation lists."""


class ValueFault(Exception):
    """Raised for a message that is not an encoded value, and for a value without an encoding."""


class NoEncoding(ValueFault):
    """Raised for a value of a class without an encoding."""


class Stays:
    """A reference to an object that stays in the candidate's process; the reference equals no other value in the grader."""

    __slots__ = ("nature", "number")

    def __init__(self, number: int, nature: str = "") -> None:
        self.number, self.nature = number, nature
        """The kind of the object: `iterator`, or the name of its class."""


def encode(value: Plain) -> str:
    """Encode a value as a string.

    Raises ValueFault for a value that has no encoding or is too large.
    """
    try:
        text = json.dumps(_written(value, [MAX_PARTS], 0), separators=(",", ":"))
    except (RecursionError, ValueError, OverflowError, MemoryError) as error:
        raise ValueFault(f"a value that cannot be sent: {error}") from None
    if len(text) > MAX_TEXT:
        raise ValueFault(f"a value of {len(text):,} characters; the most is {MAX_TEXT:,}")
    return text


def decode(text: str | bytes, *, with_nan: bool = True, resolve: Callable[[int], Any] | None = None) -> Plain:
    """Decode a value from a string.

    Raises ValueFault for any string that `encode` would not return. If `with_nan` is False, a NaN anywhere in the value also
    raises ValueFault. `resolve` is a function from the number of an object to the object. Without `resolve`, an object must be
    the entire value, because a comparison such as `[object] != [5]` would always be true.
    """
    if len(text) > MAX_TEXT:
        raise ValueFault(f"a message of {len(text):,} characters; the most is {MAX_TEXT:,}")
    try:
        parts = json.loads(text, parse_int=_short, parse_constant=_refuse, object_pairs_hook=_refuse)
        return _read(parts, with_nan, resolve, 0)
    except RecursionError:
        raise ValueFault("a message nested too deeply") from None
    except (ValueError, TypeError, OverflowError, ArithmeticError, IndexError, KeyError) as error:
        raise ValueFault(f"a message that is not in the encoding: {str(error)[:200]}") from None


def spread(keys: Iterable[Plain]) -> None:
    """Raise ValueFault if many keys have the same hash."""
    counts: dict[int, int] = {}
    for key in keys:
        number = hash(key)
        counts[number] = counts.get(number, 0) + 1
        if counts[number] > MAX_COLLIDING:
            raise ValueFault("many keys with one hash")


_BASES: tuple[type, ...] = (int, float, str, list, tuple, dict, set, frozenset, complex, bytes, bytearray)
_SEQUENCES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, collections.deque)
}
_VIEWS: dict[type, str] = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
_DATES: dict[str, Any] = {kind.__name__: kind for kind in (dt.datetime, dt.date, dt.time)}
_TYPES = {kind.__name__: kind for kind in (*_BASES, bool, type(None))}
_SHORT = 10**18


def _written(value: Any, left: list[int], depth: int) -> Any:
    """Return the JSON form of a value; `left` contains the number of parts that may still be encoded."""
    left[0] -= 1
    if left[0] < 0 or depth > MAX_DEPTH:
        raise ValueFault("a value that is too large, or nested too deeply")
    if isinstance(value, (collections.UserDict, collections.UserList, collections.UserString)):
        value = value.data
    if type(value).__module__ == "numpy" and not hasattr(value, "__len__"):  # a NumPy number
        value = value.item()
    kind = type(value)
    if kind not in _BASES and kind is not bool:
        # A value of a subclass of a built-in type is encoded as that type, without calling its methods.
        kind = next((base for base in _BASES if isinstance(value, base)), kind)
    if value is None or kind is bool:
        return value
    if kind is str:
        return str.__str__(value)
    if kind is int:
        number = int.__index__(value)
        if number.bit_length() > MAX_BITS:
            raise ValueFault(f"an integer of more than {MAX_BITS:,} bits")
        return number if -_SHORT < number < _SHORT else ["int", hex(number)]
    if kind is float:
        real = float.__float__(value)
        return real if real - real == 0 else ["float", repr(real)]

    def parts(items: Iterable[Any]) -> list[Any]:
        known = list(items)
        kinds = set(map(type, known))
        if kinds <= {bool, str} or (kinds == {int} and max(known) < _SHORT and min(known) > -_SHORT):
            # Fast path for most lists.
            left[0] -= len(known)
            return known
        return [_written(item, left, depth + 1) for item in known]

    if kind is list or kind is tuple or kind is set or kind is frozenset:
        if kind is set or kind is frozenset:
            spread(kind.__iter__(value))
        return [kind.__name__, *parts(kind.__iter__(value))]
    if kind is dict:
        spread(dict.__iter__(value))
        return [
            "counter" if isinstance(value, collections.Counter) else "dict",
            *parts(part for pair in dict.items(value) for part in pair),
        ]
    if kind is complex:
        return ["complex", *parts((complex.__complex__(value).real, complex.__complex__(value).imag))]
    if kind is bytes or kind is bytearray:
        return [kind.__name__, kind.hex(value)]
    if isinstance(value, collections.deque):
        return ["deque", *parts(value)]
    if kind in _VIEWS:
        items = (part for pair in value for part in pair) if _VIEWS[kind] == "items" else value
        return [_VIEWS[kind], *parts(items)]
    if kind is range:
        return ["range", *(hex(part) for part in (value.start, value.stop, value.step))]
    if isinstance(value, type) and _TYPES.get(value.__name__) is value:
        return ["type", value.__name__]
    if isinstance(value, Stays):
        return ["object", value.number, value.nature]
    if isinstance(value, fractions.Fraction):
        return ["fraction", hex(value.numerator), hex(value.denominator)]
    if isinstance(value, decimal.Decimal):
        return ["decimal", decimal.Decimal.__str__(value)]
    if isinstance(value, dt.timedelta):
        return ["timedelta", value.days, value.seconds, value.microseconds]
    for name, date in _DATES.items():  # `datetime` comes first, because it is a subclass of `date`
        if isinstance(value, date):
            return [name, date.isoformat(value)]
    raise NoEncoding(f"a value of type {kind.__name__}, which has no encoding")


def _read(part: Any, with_nan: bool, resolve: Callable[[int], Any] | None, depth: int) -> Plain:
    if type(part) is not list:
        return part
    if depth > MAX_DEPTH + 2:
        raise ValueFault("a message nested too deeply")
    kind = part[0]
    items = [_read(item, with_nan, resolve, depth + 1) if type(item) is list else item for item in part[1:]]
    if kind == "object":
        if resolve is not None:
            return resolve(items[0])
        if depth:
            raise ValueFault("an object inside a value")
        return Stays(int(items[0]), str(items[1]))
    if kind in _SEQUENCES:
        if kind in ("set", "frozenset"):
            spread(items)
        return _SEQUENCES[kind](items)
    if kind in ("dict", "counter", "items"):
        spread(items[::2])
        found = dict(zip(items[::2], items[1::2], strict=True))
        return (
            found.items() if kind == "items" else collections.Counter(found) if kind == "counter" else found
        )
    if kind == "keys":
        spread(items)
        return dict.fromkeys(items).keys()
    if kind == "values":
        return dict(enumerate(items)).values()
    value = _READERS[kind](*items)
    if not with_nan and value != value:  # noqa: PLR0124 (only NaN differs from itself)
        raise ValueFault("NaN, which no test here expects")
    return value


_HEX = re.compile(r"-?0x[0-9a-f]+", re.ASCII)
_DECIMAL = re.compile(r"-?[0-9]{1,9999}(?:\.[0-9]{0,9999})?(?:E([+-]?[0-9]{1,4}))?|-?Infinity", re.ASCII)


def _integer(text: str) -> int:
    if _HEX.fullmatch(text) is None or len(text) > MAX_BITS // 4 + 4:
        raise ValueFault("an integer that is not hexadecimal digits, or has too many")
    return int(text, 16)


def _decimal(text: str) -> decimal.Decimal:
    found = _DECIMAL.fullmatch(text)
    if found is None or abs(int(found[1] or 0)) > MAX_EXPONENT:
        raise ValueFault("a decimal number that is not finite, or too large")
    return decimal.Decimal(text)


_READERS: dict[str, Callable[..., Any]] = {
    "int": _integer,
    "float": lambda text: {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}[text],
    "complex": lambda real, imaginary: complex(float(real), float(imaginary)),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda start, stop, step: range(_integer(start), _integer(stop), _integer(step)),
    "fraction": lambda top, bottom: fractions.Fraction(_integer(top), _integer(bottom)),
    "decimal": _decimal,
    "type": _TYPES.__getitem__,
    "timedelta": lambda *parts: dt.timedelta(*map(int, parts)),
    **{name: date.fromisoformat for name, date in _DATES.items()},
}


def _short(text: str) -> int:
    if len(text) > 19:
        raise ValueFault(f"the long number {text[:20]}")
    return int(text)


def _refuse(found: Any) -> NoReturn:
    raise ValueFault(f"JSON that is not in the encoding: {str(found)[:20]}")
