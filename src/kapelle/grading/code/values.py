"""Python values as strict JSON: what candidates and tests say to each other.

A message is a list of nodes; a node is a list of its kind and its parts. A part is `null`, a boolean or a text, which stand for
themselves, or the place of an earlier node. The last node is the value. So no value is too deep, and what is one object twice is so again.

    ["it", part]: the value itself  ["int", "-7"]  ["hex", "-0xff"]  ["float", "0x1.8p+1"]  ["complex", "0x0p+0", "inf"]  ["bytes", "00ff"]
    ["list", part, ..]  ["tuple", ..]  ["set", ..]  ["frozenset", ..]  ["dict", key, value, key, value, ..]
    ["list of int", "1 2 3"]  ["list of float", ..]: also of tuples, sets and frozen sets, where there is nothing else in them
    ["bytearray", "00ff"]  ["range", "0", "9", "1"]  ["slice", part, part, part]  ["constant", "Ellipsis"]
    ["fraction", "1/3"]  ["decimal", "0.10"]  ["date", "2024-02-29"]  ["timedelta", "1", "0", "5"]  ["path", "a/b"] ..
    ["counter", dict]  ["ordered", dict]  ["defaultdict", factory, dict]  ["deque", length or null, list]  ["keys", list] ..
    ["named", name, tuple of names, tuple]: a named tuple
    ["type", "int"]: one of the built-in types and exceptions, or of the standard library's values
    [any other kind, part, ..]: what stays in one process, told by `refer` and found by `resolve`

Nothing else is read: no floats of JSON, no second spelling. What is decoded is always of a built-in type or the standard library's: no
method of the candidate's can run where its answers are compared. Standard library only: the file is copied into sandboxes as it stands.
"""

from __future__ import annotations

import builtins
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, NoReturn, Self

MAX_TEXT = 16_000_000
"""Characters of one message."""
MAX_COLLIDING = 50
"""Elements of one set or dictionary with the same hash: a candidate can choose hashes, and each then costs as much as all before it."""
MAX_EXPONENT = 6000
"""Of a decimal number."""
MAX_KEY_DEPTH = 200
"""Of a key, or of an element of a set: hashing goes down into it."""
SHORT = 2**62
"""From here on integers are written in base 16: decimal digits would take quadratic time."""


class ValueFault(Exception):
    """A text that is not a value in this encoding, or a value that has none."""


Plain = Any
"""A value of built-in types, and of the standard library's."""
Refer = Callable[[Any], tuple[Any, ...] | None]
"""Returns the kind and the parts of what stays in this process; None for what is a value."""
Resolve = Callable[..., Any]
"""Given a kind and its parts, returns what stands for them here."""


class Named(tuple[Any, ...]):  # noqa: SLOT001 (a tuple with slots of its own has no attributes)
    """A named tuple of a class that this process does not know: a tuple whose items have names."""

    name: str
    _fields: tuple[str, ...]

    def __new__(cls, name: str, fields: tuple[str, ...], items: Iterable[Any]) -> Self:  # noqa: D102 (its parts)
        new = super().__new__(cls, items)
        new.name, new._fields = name, fields
        return new

    def __getattribute__(self, name: str) -> Any:
        # A field may be called `count`, `index` or `name`.
        fields = object.__getattribute__(self, "_fields") if not name.startswith("_") else ()
        return self[fields.index(name)] if name in fields else object.__getattribute__(self, name)

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changes: Any) -> Named:
        new = {**self._asdict(), **changes}
        if len(new) > len(self):
            raise ValueError(f"{self._called()} has no such fields")
        return Named(self._called(), self._fields, new.values())

    def _called(self) -> str:
        return str(object.__getattribute__(self, "name"))

    def __repr__(self) -> str:
        return f"{self._called()}({', '.join(f'{name}={item!r}' for name, item in self._asdict().items())})"


def plain(value: Any) -> Any:
    """Return a collection as the built-in one that has the same items; anything else as it is."""
    if isinstance(value, Named):
        return tuple(value)
    if isinstance(value, dict) and type(value) is not dict:
        return dict(dict.items(value))
    if "collections" in sys.modules and isinstance(value, sys.modules["collections"].deque):
        return list(value)
    return value


def encode(value: Plain, refer: Refer | None = None) -> str:
    """Return a value's text; `refer` is asked first about each thing that is none of the commonest values.

    Raises ValueFault for what has no encoding, and for values that are too large.
    """
    try:
        text = json.dumps(_Writer(refer).nodes_of(value), separators=(",", ":"))
    except (RecursionError, ValueError, OverflowError, MemoryError) as error:
        raise ValueFault(f"a value that cannot be sent: {error}") from None
    if len(text) > MAX_TEXT:
        raise ValueFault(f"a value of {len(text):,} characters; the most is {MAX_TEXT:,}")
    return text


def decode(text: str | bytes, resolve: Resolve | None = None) -> Plain:
    """Return the value of a text. Raises ValueFault for anything that `encode` would not write."""
    if len(text) > MAX_TEXT:
        raise ValueFault(f"a message of {len(text):,} characters; the most is {MAX_TEXT:,}")
    try:
        nodes = json.loads(
            text, parse_int=_place, parse_float=_refuse, parse_constant=_refuse, object_pairs_hook=_refuse
        )
        return _read(nodes, resolve)
    except RecursionError:
        raise ValueFault("a message nested too deeply") from None
    except (ValueError, TypeError, OverflowError, ArithmeticError, IndexError, KeyError) as error:
        raise ValueFault(f"a message that is not in the encoding: {str(error)[:200]}") from None


def said_by(error: BaseException) -> str:
    """Return the text that an exception was made with; `str` would quote a KeyError's once more each time."""
    only = error.args[0] if isinstance(error, KeyError) and len(error.args) == 1 else None
    return (only if type(only) is str else f"{error}")[:500]


class _Writer:
    def __init__(self, refer: Refer | None) -> None:
        self._refer = refer
        self._nodes: list[list[Any]] = []
        self._known: dict[int, int] = {}
        self._kept: list[Any] = []

    def nodes_of(self, value: Plain) -> list[list[Any]]:
        """Return the nodes of a value; a loop over a stack, so that depth costs nothing but memory."""
        root = self._part(value)
        stack = [root] if isinstance(root, _Open) else []
        open_now = {id(root.value)} if stack else set()
        while stack:
            top = stack[-1]
            for child in top.children:
                part = self._part(child)
                if isinstance(part, _Open):
                    if id(part.value) in open_now:
                        raise ValueFault("a value that contains itself")
                    open_now.add(id(part.value))
                    stack.append(part)
                    break
                top.node.append(part)
            else:
                stack.pop()
                open_now.discard(id(top.value))
                place = self._place(top.node, top.value)
                if stack:
                    stack[-1].node.append(place)
                root = place
        if type(root) is not int or root != len(self._nodes) - 1:
            self._nodes.append(["it", root])
        return self._nodes

    def _place(self, node: list[Any], value: Any) -> int:
        self._nodes.append(node)
        # What is made on the way may be freed, and another one stand where it stood.
        self._kept.append(value)
        self._known[id(value)] = len(self._nodes) - 1
        return len(self._nodes) - 1

    def _part(self, value: Any) -> Any:
        """Return the part that says a value, or what is open until its children are said."""
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if id(value) in self._known:
            return self._known[id(value)]
        if kind in _SIMPLE:
            return self._place(_SIMPLE[kind](value), value)
        if kind in _CONTAINERS:
            return self._container(_CONTAINERS[kind], value)
        found = self._refer(value) if self._refer is not None else None
        if found is not None:
            return _Open(value, [found[0]], iter(found[1:]))
        # A value of a rarer type, or of a subclass, as the type it derives from.
        if isinstance(value, type) and type_name(value):
            return self._place(["type", type_name(value)], value)
        parts = _collection(value)
        if parts is not None:
            return _Open(value, [parts[0]], iter(parts[1:]))
        for above, name in _CONTAINERS.items():
            if isinstance(value, above):
                return self._container(
                    name, above(above.__iter__(value)) if name != "dict" else dict(dict.items(value))
                )
        if isinstance(value, str):
            return str.__str__(value)
        for above, write in _SIMPLE.items():
            if isinstance(value, above):
                return self._place(write(value), value)
        for name, (module, names, written, _) in _LIBRARY.items():
            # Only a value of a class that is loaded can be one of its kind.
            if module in sys.modules and isinstance(value, getattr(sys.modules[module], names)):
                texts = written(value)
                return self._place([name, *([texts] if type(texts) is str else texts)], value)
        raise ValueFault(f"a value of type {type(value).__name__}, which has no encoding")

    def _container(self, kind: str, value: Any) -> Any:
        if kind == "dict":
            _spread(value)
            return _Open(value, [kind], (part for pair in value.items() for part in pair))
        if kind in _HASHED:
            _spread(value)
        only = {*map(type, value)}
        if only == {int} and all(-SHORT < item < SHORT for item in value):
            return self._place([f"{kind} of int", " ".join(map(str, value))], value)
        if only == {float}:
            return self._place([f"{kind} of float", " ".join(map(float.hex, value))], value)
        return _Open(value, [kind], iter(value))


class _Open:
    """A node whose children are not all said."""

    __slots__ = ("children", "node", "value")

    def __init__(self, value: Any, node: list[Any], children: Iterator[Any]) -> None:
        self.value, self.node, self.children = value, node, children


def _collection(value: Any) -> tuple[Any, ...] | None:
    """Return the kind and the parts of a collection of the standard library's; None for what is none of these."""
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None) if type(value) is not tuple else None
        if type(fields) is not tuple or tuple(map(type, fields)) != (str,) * tuple.__len__(value):
            return None
        name = value._called() if isinstance(value, Named) else type(value).__name__  # noqa: SLF001 (ours)
        return "named", name, fields, tuple(tuple.__iter__(value))
    if isinstance(value, slice):
        return "slice", value.start, value.stop, value.step
    for kind, (view, _) in _VIEWS.items():
        if type(value) is view:
            items: Any = value
            return kind, list(items)
    if isinstance(value, BaseException) and vars(builtins).get(type(value).__name__) is type(value):
        return "exception", type(value), value.args
    if "types" in sys.modules and type(value) is sys.modules["types"].SimpleNamespace:
        return "namespace", vars(value)
    if "array" in sys.modules and isinstance(value, sys.modules["array"].array):
        return "array", value.typecode, value.tolist()
    known = sys.modules.get("collections")
    if known is None:
        return None
    if isinstance(value, known.defaultdict):
        return "defaultdict", value.default_factory, dict(dict.items(value))
    if isinstance(value, (known.Counter, known.OrderedDict)):
        return "counter" if isinstance(value, known.Counter) else "ordered", dict(value.items())
    if isinstance(value, known.deque):
        return "deque", None if value.maxlen is None else str(value.maxlen), list(value)
    return None


def _read(nodes: Any, resolve: Resolve | None) -> Plain:
    values: list[Plain] = []
    # As if nothing were shared: `(x, x)` of `(x, x)` of … is hashed in all its parts.
    hashed = 0
    depths: list[int] = []
    sizes: list[int] = []

    for node in _expect(nodes, list):
        if type(node) is not list or not node or type(node[0]) is not str:
            raise ValueFault("a node without its kind")
        kind, *items = node
        inside = [item for item in items if type(item) is _Place and item < len(values)]
        keys = [] if kind not in _HASHED else items[::2] if kind == "dict" else items
        for item in keys:
            if type(item) is _Place and item < len(values):
                hashed += sizes[item]
                if depths[item] > MAX_KEY_DEPTH or hashed > MAX_TEXT:
                    raise ValueFault("a key nested too deeply, or too large")
        parts: list[Plain] = []
        for item in items:
            if type(item) is _Place:
                if item >= len(values):
                    raise ValueFault("a node that names a later one")
                parts.append(values[item])
            elif item is None or type(item) is bool or type(item) is str:
                parts.append(item)
            else:
                raise ValueFault("a node inside a node")
        values.append(_value(kind, parts, resolve))
        depths.append(1 + max((depths[item] for item in inside), default=0))
        texts = 0 if kind in _SEQUENCES else sum(len(item) for item in items if type(item) is str)
        sizes.append(min(1 + len(items) + texts + sum(sizes[item] for item in inside), MAX_TEXT + 1))
    if not values:
        raise ValueFault("a message without a value")
    return values[-1]


def _value(kind: str, parts: list[Any], resolve: Resolve | None) -> Plain:
    if kind in _SEQUENCES:
        if kind in _HASHED:
            _spread(parts)
        return _SEQUENCES[kind](parts)
    if kind == "dict":
        if len(parts) % 2:
            raise ValueFault("a key without a value")
        _spread(parts[::2])
        return dict(zip(parts[::2], parts[1::2], strict=True))
    container, of, item = kind.partition(" of ")
    if of and container in _SEQUENCES and item in _PACKED:
        if len(parts) != 1:
            raise ValueFault("a node with the wrong number of parts")
        read = [_PACKED[item](text) for text in _expect(parts[0], str).split(" ")]
        return _value(container, [_number(each, resolve) for each in read], None)
    if kind in _READERS:
        return _number(_READERS[kind](*parts), resolve)
    if resolve is None:
        raise ValueFault(f"the unknown kind {kind[:20]!r}")
    return resolve(kind, *parts)


def _number(value: Any, resolve: Resolve | None) -> Any:
    """Return a value; what NaN is, is for `resolve` to say."""
    is_nan = resolve is not None and type(value) in (float, complex) and value != value  # noqa: PLR0124 (NaN alone)
    return resolve("nan", value) if is_nan and resolve is not None else value


def _spread(keys: Iterable[Plain]) -> None:
    """Raise ValueFault where the hashes of many keys are the same; hashes themselves are hashed without collisions."""
    counts: dict[int, int] = {}
    for key in keys:
        number = hash(key)
        counts[number] = counts.get(number, 0) + 1
        if counts[number] > MAX_COLLIDING:
            raise ValueFault("many keys with one hash")


_DIGITS = re.compile(r"-?[0-9]{1,40}", re.ASCII)
_HEX = re.compile(r"-?0x[0-9a-f]+", re.ASCII)


def _integer(text: Any) -> int:
    if _DIGITS.fullmatch(_expect(text, str)) is None:
        raise ValueFault("an integer that is not plain decimal digits, or has too many")
    return int(text)


def _hexadecimal(text: Any) -> int:
    if _HEX.fullmatch(_expect(text, str)) is None:
        raise ValueFault("an integer that is not plain digits")
    return int(text, 16)


def _float(text: Any) -> float:
    return float.fromhex(_expect(text, str))


def _write_int(value: int) -> list[Any]:
    value = int(value)
    return ["int", int.__repr__(value)] if -SHORT < value < SHORT else ["hex", hex(value)]


def _write_integer(value: int) -> str:
    return str(_write_int(value)[1])


def _read_integer(text: Any) -> int:
    return _hexadecimal(text) if "x" in _expect(text, str) else _integer(text)


def _fraction(text: Any) -> Any:
    from fractions import Fraction

    top, mark, bottom = _expect(text, str).partition("/")
    if not mark or _read_integer(bottom) <= 0:
        raise ValueFault("a fraction that is not one")
    return Fraction(_read_integer(top), _read_integer(bottom))


_DECIMAL = re.compile(r"-?[0-9]{1,9999}(?:\.[0-9]{0,9999})?(?:E([+-]?[0-9]{1,4}))?|-?Infinity", re.ASCII)


def _decimal_text(value: Any) -> str:
    text = str(value)
    found = _DECIMAL.fullmatch(text)
    if found is None or abs(int(found[1] or 0)) > MAX_EXPONENT:
        raise ValueFault("a decimal number that is not finite, or too large")
    return text


def _library(module: str, path: str, *kinds: Any) -> Callable[..., Any]:
    """Return what calls a class, or a method of one, of the standard library with parts of these kinds: a type, or what reads one.

    The module is loaded with the first value.
    """

    def read(*parts: Any) -> Any:
        made: Any = import_module(module)
        for name in path.split("."):
            made = getattr(made, name)
        checked = [
            _expect(part, kind) if isinstance(kind, type) else kind(part)
            for part, kind in zip(parts, kinds, strict=True)
        ]
        return made(*checked)

    return read


# Name → module, class, how it is written, how it is read. A datetime is a date, too: it stands first.
_LIBRARY: dict[str, tuple[str, str, Callable[[Any], Any], Callable[..., Any]]] = {
    "fraction": (
        "fractions",
        "Fraction",
        lambda v: f"{_write_integer(v.numerator)}/{_write_integer(v.denominator)}",
        _fraction,
    ),
    "decimal": (
        "decimal",
        "Decimal",
        _decimal_text,
        _library("decimal", "Decimal", lambda text: _decimal_text(_expect(text, str))),
    ),
    **{
        kind: ("datetime", kind, lambda v: v.isoformat(), _library("datetime", f"{kind}.fromisoformat", str))
        for kind in ("datetime", "date", "time")
    },
    "timedelta": (
        "datetime",
        "timedelta",
        lambda v: [str(v.days), str(v.seconds), str(v.microseconds)],
        _library("datetime", "timedelta", _integer, _integer, _integer),
    ),
    **{
        kind: (module, name, str, _library(module, name, str))
        for kind, module, name in (
            ("real path", "pathlib", "PosixPath"),
            ("path", "pathlib", "PurePosixPath"),
            ("uuid", "uuid", "UUID"),
            ("ip", "ipaddress", "IPv4Address"),
        )
    },
}

_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range, slice),
        *(object, type, type(None)),
        *(kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)),
    )
}  # fmt: skip
_LIBRARY_TYPES = {
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    **{
        module: tuple(each[1] for each in _LIBRARY.values() if each[0] == module)
        for module in sorted({each[0] for each in _LIBRARY.values()})
    },
}


def type_name(kind: type) -> str:
    """Return the name of a type that both processes have; empty for any other."""
    if _TYPES.get(kind.__name__) is kind:
        return kind.__name__
    module = kind.__module__
    known = kind.__name__ in _LIBRARY_TYPES.get(module, ())
    return (
        f"{module}.{kind.__name__}" if known and vars(sys.modules[module]).get(kind.__name__) is kind else ""
    )


def _type(text: Any) -> type:
    module, dot, name = _expect(text, str).rpartition(".")
    if not dot:
        return _TYPES[name]
    if name not in _LIBRARY_TYPES[module]:
        raise ValueFault("an unknown type")
    found: type = getattr(import_module(module), name)
    return found


def _named(name: Any, fields: Any, items: Any) -> Named:
    if not all(type(field) is str for field in _expect(fields, tuple)) or len(fields) != len(
        _expect(items, tuple)
    ):
        raise TypeError("a name for each item belongs here")
    return Named(_expect(name, str), fields, items)


def _exception(kind: Any, args: Any) -> BaseException:
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise TypeError("an exception's type belongs here")
    found: BaseException = kind.__new__(kind, *_expect(args, tuple))
    return found


_VIEWS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "keys": (type({}.keys()), lambda items: dict.fromkeys(_expect(items, list)).keys()),
    "values": (type({}.values()), lambda items: dict(enumerate(_expect(items, list))).values()),
    "items": (type({}.items()), lambda items: dict(_expect(items, list)).items()),
}
_CONSTANTS = {"Ellipsis": ..., "NotImplemented": NotImplemented}


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueFault(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


# A subclass is written as the type it derives from: that is all that can be compared outside.
_SIMPLE: dict[Any, Callable[[Any], list[Any]]] = {
    int: lambda value: _write_int(int.__index__(value)),
    float: lambda value: ["float", float.hex(value)],
    complex: lambda value: [
        "complex",
        complex.__complex__(value).real.hex(),
        complex.__complex__(value).imag.hex(),
    ],
    bytes: lambda value: ["bytes", bytes.hex(value)],
    bytearray: lambda value: ["bytearray", bytearray.hex(value)],
    range: lambda value: ["range", *map(_write_integer, (value.start, value.stop, value.step))],
    type(...): lambda _: ["constant", "Ellipsis"],
    type(NotImplemented): lambda _: ["constant", "NotImplemented"],
}
_CONTAINERS: dict[Any, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", dict: "dict"}
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_HASHED = {"set", "frozenset", "dict"}
_PACKED: dict[str, Callable[[Any], Any]] = {"int": _integer, "float": _float}
_READERS: dict[str, Callable[..., Any]] = {
    "it": lambda part: part,
    "int": _integer,
    "hex": _hexadecimal,
    "float": _float,
    "complex": lambda real, imaginary: complex(_float(real), _float(imaginary)),
    "bytes": lambda text: bytes.fromhex(_expect(text, str)),
    "bytearray": lambda text: bytearray.fromhex(_expect(text, str)),
    "range": lambda *parts: range(*map(_read_integer, parts)),
    "slice": slice,
    "constant": lambda name: _CONSTANTS[name],
    "type": _type,
    "counter": _library("collections", "Counter", dict),
    "ordered": _library("collections", "OrderedDict", dict),
    "defaultdict": _library("collections", "defaultdict", lambda factory: factory, dict),
    "deque": lambda longest, items: import_module("collections").deque(
        _expect(items, list), None if longest is None else _integer(longest)
    ),
    "named": _named,
    "namespace": lambda parts: import_module("types").SimpleNamespace(**_expect(parts, dict)),
    "array": _library("array", "array", str, list),
    "exception": _exception,
    **{kind: read for kind, (_, read) in _VIEWS.items()},
    **{name: each[3] for name, each in _LIBRARY.items()},
}


class _Place(int):
    """The place of a node."""


def _place(text: str) -> _Place:
    if len(text) > 9 or not text.isdigit():
        raise ValueFault(f"the bare number {text[:20]}")
    return _Place(text)


def _refuse(found: Any) -> NoReturn:
    raise ValueFault(f"JSON that is not in the encoding: {str(found)[:20]}")
