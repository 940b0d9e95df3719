"""Python values as strict JSON: what candidates and tests say to each other.

`None`, booleans and strings stand for themselves; everything else is an object with one key, its type:

    {"int": "-7"}  {"float": "0x1.8p+1"}  {"complex": ["0x0p+0", "inf"]}  {"bytes": "00ff"}
    {"list": [..]}  {"tuple": [..]}  {"set": [..]}  {"frozenset": [..]}  {"dict": [[key, value], ..]}
    {"bytearray": "00ff"}  {"range": ["0", "9", "1"]}  {"fraction": "1/3"}  {"decimal": "0.10"}
    {"counter": {"dict": ..}}  {"ordered": ..}  {"deque": [length or None, list]}  {"named": [name, fields, items]}
    {"date": "2024-02-29"}  {"time": ..}  {"datetime": ..}  {"timedelta": ["1", "0", "5"]}: days, seconds, microseconds
    {"type": "int"}: one of the built-in types themselves
    {"object": "3"}  {"coroutine": "3"}: a value that stays in the candidate's process, by number
    {"callback": "3"}: a function that stays in the tests' process, by number

Nothing else is read: no bare numbers, no NaN literal, no second key. What is decoded is always of a built-in
type, so that no method of the candidate's can run where its answers are compared. Standard library only: the
file is copied into sandboxes as it stands.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from kapelle.grading.code import collected

MAX_TEXT = 4_000_000
"""Characters of one message."""
MAX_DIGITS = 4300
"""Digits of one integer; longer ones take quadratic time to read."""
MAX_HASHED = 20_000
"""Elements of one set or dictionary."""
MAX_COLLIDING = 50
"""Elements of one set or dictionary with the same hash: it can be chosen, and each then costs as much as all before it."""
MAX_EXPONENT = 6000
"""Of a decimal number."""
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


class Coroutine(Reference):
    """A coroutine that stays in the candidate's process."""

    __slots__ = ()


class Callback(Reference):
    """A function that stays in the tests' process."""

    __slots__ = ()


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


def said_by(error: BaseException) -> str:
    """Return the text that an exception was made with; `str` would quote a KeyError's once more each time."""
    only = error.args[0] if len(error.args) == 1 else None
    return (only if type(only) is str else f"{error}")[:500]


def _pack(value: Plain, refer: Callable[[Any], int] | None, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueFault("a value nested too deeply")
    if value is None or isinstance(value, bool):
        return value
    for kind, write in _WRITERS:
        if isinstance(value, kind):
            return write(value)
    parts = collected.parts_of(value)
    if parts is not None:
        return {parts[0]: _pack(parts[1], refer, depth + 1)}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            _check_hashed(name, value)
            return {name: [_pack(item, refer, depth + 1) for item in value]}
    if isinstance(value, dict):
        pairs = dict.items(value)
        _check_hashed("dict", dict.keys(value))
        return {"dict": [[_pack(k, refer, depth + 1), _pack(v, refer, depth + 1)] for k, v in pairs]}
    if type(value) is type and value in _TYPE_NAMES:
        return {"type": _TYPE_NAMES[value]}
    for name, (module, kind, written, _) in _LIBRARY.items():
        # Only a value of a class that is loaded can be one of its kind.
        if module in sys.modules and isinstance(value, getattr(sys.modules[module], kind)):
            return {name: written(value)}
    if refer is None:
        raise ValueFault(f"a value of type {type(value).__name__}, which has no encoding")
    return {"coroutine" if type(value) is _COROUTINE else "object": str(refer(value))}


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
    if name in _LIBRARY:
        return _LIBRARY[name][3](content)
    if name in collected.KINDS:
        return collected.made(name, _unpack(content, depth + 1))
    items = _expect(content, list)
    if name == "range":
        return range(*(_integer(_expect(part, str)) for part in items))
    if name in _HASHED:
        _check_size(name, items)
    if name == "dict":
        pairs = [[_unpack(part, depth + 1) for part in _expect(pair, list)] for pair in items]
        _spread([pair[0] for pair in pairs])
        return {key: value for key, value in pairs}  # noqa: C416 (checks that each is a pair)
    if name not in _SEQUENCES:
        raise ValueFault(f"the unknown type {name[:20]!r}")
    values = [_unpack(item, depth + 1) for item in items]
    if name in _HASHED:
        _spread(values)
    return _SEQUENCES[name](values)


def _check_size(name: str, keys: Collection[Plain]) -> None:
    if len(keys) > MAX_HASHED:
        raise ValueFault(f"a {name} of {len(keys):,} elements; the most is {MAX_HASHED:,}")


def _check_hashed(name: str, items: Collection[Plain]) -> None:
    """Raise ValueFault for what would not be read again: else a candidate could make the tests send it."""
    if name in _HASHED:
        _check_size(name, items)
        _spread(items)


def _spread(keys: Collection[Plain]) -> None:
    """Raise ValueFault where the hashes of many keys are the same; hashes themselves are hashed without collisions."""
    counts: dict[int, int] = {}
    for key in keys:
        number = hash(key)
        counts[number] = counts.get(number, 0) + 1
        if counts[number] > MAX_COLLIDING:
            raise ValueFault("many keys with one hash")


def _integer(text: str) -> int:
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > MAX_DIGITS:
        raise ValueFault("an integer that is not plain decimal digits, or has too many")
    return int(text)


def _fraction(text: Any) -> Any:
    from fractions import Fraction

    top, mark, bottom = _expect(text, str).partition("/")
    if not mark or _integer(bottom) <= 0:
        raise ValueFault("a fraction that is not one")
    return Fraction(_integer(top), _integer(bottom))


_DECIMAL = re.compile(r"-?[0-9]{1,4300}(?:\.[0-9]{0,4300})?(?:E([+-]?[0-9]{1,4}))?|-?Infinity")


def _decimal(text: Any) -> Any:
    from decimal import Decimal

    return Decimal(_decimal_text(_expect(text, str)))


def _decimal_text(value: Any) -> str:
    text = str(value)
    found = _DECIMAL.fullmatch(text)
    if found is None or abs(int(found[1] or 0)) > MAX_EXPONENT:
        raise ValueFault("a decimal number that is not finite, or too large")
    return text


def _moment(kind: str) -> Callable[[Any], Any]:
    def read(text: Any) -> Any:
        import datetime as dt

        return getattr(dt, kind).fromisoformat(_expect(text, str))

    return read


def _timedelta(parts: Any) -> Any:
    import datetime as dt

    days, seconds, microseconds = (_integer(_expect(part, str)) for part in _expect(parts, list))
    return dt.timedelta(days, seconds, microseconds)


# Name → module, class, how it is written, how it is read. A datetime is a date, too: it stands first.
_LIBRARY: dict[str, tuple[str, str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "fraction": ("fractions", "Fraction", lambda v: f"{v.numerator}/{v.denominator}", _fraction),
    "decimal": ("decimal", "Decimal", _decimal_text, _decimal),
    "datetime": ("datetime", "datetime", lambda v: v.isoformat(), _moment("datetime")),
    "date": ("datetime", "date", lambda v: v.isoformat(), _moment("date")),
    "time": ("datetime", "time", lambda v: v.isoformat(), _moment("time")),
    "timedelta": (
        "datetime",
        "timedelta",
        lambda v: [str(v.days), str(v.seconds), str(v.microseconds)],
        _timedelta,
    ),
}


async def _nothing() -> None:
    return None


_never = _nothing()
_COROUTINE = type(_never)
_never.close()


def _type(text: str) -> type:
    if text not in _TYPES:
        raise ValueFault(f"the unknown type {text[:20]!r}")
    return _TYPES[text]


def _reference(text: str) -> Reference:
    return Reference(_integer(text))


def _coroutine(text: str) -> Reference:
    return Coroutine(_integer(text))


def _callback(text: str) -> Reference:
    return Callback(_integer(text))


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
    (bytearray, lambda value: {"bytearray": value.hex()}),
    (range, lambda value: {"range": [str(value.start), str(value.stop), str(value.step)]}),
    (Coroutine, lambda value: {"coroutine": str(value.number)}),
    (Callback, lambda value: {"callback": str(value.number)}),
    (Reference, lambda value: {"object": str(value.number)}),
)
_SCALARS: dict[str, Callable[[str], Any]] = {
    "int": _integer,
    "float": float.fromhex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "type": _type,
    "object": _reference,
    "coroutine": _coroutine,
    "callback": _callback,
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
