"""Counters, deques, ordered dictionaries and named tuples, as plain values under a name.

Standard library only: the file is copied into sandboxes as it stands.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Self


class Named(tuple[Any, ...]):  # noqa: SLOT001 (a tuple with slots of its own has no attributes)
    """A named tuple of a class that this process does not know: a tuple whose items have names."""

    name: str
    _fields: tuple[str, ...]

    def __new__(cls, name: str, fields: tuple[str, ...], items: Iterable[Any]) -> Self:  # noqa: D102 (its parts)
        new = super().__new__(cls, items)
        new.name, new._fields = name, fields
        return new

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._fields:
            raise AttributeError(name)
        return self[self._fields.index(name)]

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changes: Any) -> Named:
        new = {**self._asdict(), **changes}
        if len(new) > len(self):
            raise ValueError(f"{self.name} has no such fields")
        return Named(self.name, self._fields, new.values())

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={item!r}' for name, item in self._asdict().items())})"


def parts_of(value: Any) -> tuple[str, Any] | None:
    """Return the kind of a collection and a plain value that says all of it; None for what is none of these."""
    if isinstance(value, tuple):
        return _named_parts(value)
    known = sys.modules.get("collections")
    if known is None:
        return None
    if isinstance(value, (known.Counter, known.OrderedDict)):
        return "counter" if isinstance(value, known.Counter) else "ordered", dict(value.items())
    return ("deque", (value.maxlen, list(value))) if isinstance(value, known.deque) else None


def _named_parts(value: Any) -> tuple[str, Any] | None:
    fields = getattr(value, "_fields", None) if type(value) is not tuple else None
    if fields is None or tuple(map(type, fields)) != (str,) * tuple.__len__(value):
        return None
    name = value.name if isinstance(value, Named) else type(value).__name__
    return "named", (name, list(fields), list(tuple.__iter__(value)))


def made(kind: str, parts: Any) -> Any:
    """Return the collection of a kind. Raises TypeError and ValueError for parts of another form."""
    from collections import Counter, OrderedDict, deque

    if kind in ("counter", "ordered"):
        if type(parts) is not dict:
            raise TypeError("pairs belong here")
        return Counter(parts) if kind == "counter" else OrderedDict(parts)
    if kind == "deque":
        longest, items = parts
        return deque(items, longest)
    name, fields, items = parts
    if type(name) is not str or not all(type(field) is str for field in fields) or len(fields) != len(items):
        raise TypeError("a name for each item belongs here")
    return Named(name, tuple(fields), items)


KINDS = frozenset({"counter", "ordered", "deque", "named"})


def plain(value: Any) -> Any:
    """Return a collection as the built-in one that has the same items; anything else as it is."""
    if isinstance(value, Named):
        return tuple(value)
    found = None if isinstance(value, tuple) else parts_of(value)
    if found is None:
        return value
    return found[1][1] if found[0] == "deque" else found[1]


def mapped(function: Any, value: Any) -> Any:
    """Return a container of the same kind with a function of each of its items, keys included; anything else as it is."""
    if isinstance(value, Named):
        return Named(value.name, value._fields, map(function, value))
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(map(function, value))
    if isinstance(value, Mapping):
        items: Any = {function(key): function(item) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    found = parts_of(value)
    return value if found is None else made("deque", (found[1][0], list(map(function, found[1][1]))))
