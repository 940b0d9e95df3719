"""Import `solution.py` inside the candidate's sandbox and execute one request at a time.

This process is not trusted. The solution runs in the same process and may take it over, but then it can only send values, which
it may do anyway. A request is one line: an unguessable mark and a typed value, `(keep, operation, part, ..)` (see
`_OPERATIONS`). A reply is one line that begins with the same mark:

    value VALUE   the result; with `keep`, or if it has no encoding, the object stays here and VALUE is its number
    error (name of the exception's class, text)

This file uses only the standard library and the encoding (`values`), because both files are copied into sandboxes unchanged.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from kapelle.environments.grading.code.values import NoEncoding, Stays, decode, encode

MATCH = "re.Match"
_kept: list[Any] = []
"""The objects that stay in the candidate's process; the index of an object is its number."""


def serve() -> None:
    """Execute the requests from standard input until the input ends, and write the replies to standard output."""
    # Solutions may recurse more deeply and write longer numbers than Python's default limits allow.
    sys.setrecursionlimit(10_000)
    sys.set_int_max_str_digits(0)
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as replies:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        for line in requests:
            mark, _, text = line.partition(b" ")
            replies.write(mark + b" " + _answer(text).encode() + b"\n")
            replies.flush()


def _answer(text: bytes) -> str:
    try:
        keep, operation, *parts = decode(text, resolve=_kept.__getitem__)
        found = _OPERATIONS[operation](*parts)
        if hasattr(type(found), "__await__"):
            import asyncio

            found = asyncio.run(_awaited(found))
        return f"value {_encoded(found, keep)}"
    except BaseException as error:  # noqa: BLE001 (the boundary to a program that may raise anything)
        return f"error {encode((type(error).__name__, _text(error)))}"


def _encoded(found: Any, keep: bool) -> str:
    if not keep:
        try:
            return encode(found)
        except NoEncoding:
            pass
    _kept.append(found)
    nature = "iterator" if isinstance(found, Iterator) else type(found).__name__
    return encode(Stays(len(_kept) - 1, MATCH if isinstance(found, re.Match) else nature))


def _text(error: BaseException) -> str:
    try:
        return f"{error}"[:500]
    except Exception:  # noqa: BLE001 (its own `__str__`)
        return ""


async def _awaited(found: Any) -> Any:
    return await found


def _named(name: str) -> Any:
    """Return the object with the given name in the solution, or the method of a new instance of the class `Solution`."""
    known = vars(importlib.import_module("solution"))
    if name not in known and hasattr(known.get("Solution"), name):
        return getattr(known["Solution"](), name)
    if name not in known:
        raise NameError(f"name {name!r} is not defined")
    return known[name]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    kind.__name__: kind for kind in (abs, float, int, iter, len, next, repr, round, str)
}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "value": lambda target: target,
    "fetch": _named,
    "call": lambda name, args, kwargs: _named(name)(*args, **kwargs),
    "call object": lambda target, args, kwargs: target(*args, **kwargs),
    "call method": lambda target, name, args, kwargs: getattr(target, name)(*args, **kwargs),
    "attribute": getattr,
    "set attribute": setattr,
    "item": lambda target, key: target[key],
    "take": lambda target, count: list(islice(iter(target), count)),
    "apply": lambda name, *args: _FUNCTIONS[name](*args),
}
OF_OBJECTS = frozenset(_FUNCTIONS)
"""Names of the built-in functions that the operation `apply` can call."""
