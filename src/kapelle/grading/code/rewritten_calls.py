"""What rewritten tests call where Python would decide without asking: names, conditions, `is`, `<`, `eval`, `next`, `type`.

`rewriting.py` puts the calls there; each decides with the knowledge of what is the candidate's (`remote.py`).

Standard library only: the file is copied into sandboxes as it stands.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection
from typing import Any

from kapelle.grading.code.remote import (
    CandidateError,
    Channel,
    Remote,
    ask,
    can_be_told,
    equal,
    is_candidates,
    is_sub,
    refuse,
    share,
    truth,
)


def value(name: str) -> Any:
    """Return what has this name at the candidate's: a plain value as it is now, anything else as an object."""
    try:
        found = ask("fetch", name)
    except NameError:
        return Remote(name, is_name=True)
    is_name = type(found) is Remote and found._nature == "true"  # noqa: SLF001
    return Remote(name, is_name=True) if is_name else found


def frozen(argument: Any) -> Any:
    """Return an argument, and mark it and all that it holds as what no call may change."""
    left = [argument]
    while left:
        one = left.pop()
        if id(one) not in Channel.frozen and isinstance(one, (list, dict, set, bytearray)):
            Channel.frozen[id(one)] = one
            left += one.values() if isinstance(one, dict) else [] if isinstance(one, bytearray) else one
        elif isinstance(one, tuple):
            left += one
    return argument


def check(condition: Any) -> Any:
    """Count what is checked."""
    Channel.checks += 1
    return condition


def number(operand: Any) -> Any:
    """Return an operand of `<` or `>`; refuse NaN, which makes every order false, and so `not (nan > 1)` true."""
    if isinstance(operand, float) and operand != operand and Channel.heard:  # noqa: PLR0124 (NaN alone)
        refuse("NaN, which the candidate brought about, stands where a number belongs")
    return operand


def as_float(*given: Any) -> float:
    """Return what `float` makes of a text or a number; the candidate may have written NaN as a text."""
    return _ordered(float(*given))  # type: ignore[no-any-return]


def _ordered(operand: Any) -> Any:
    return operand if Channel.takes_nan else number(operand)


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    def applied(*args: Any, **kwargs: Any) -> Any:
        # `max(0, nan)` is 0: the order of what is no number says nothing.
        if len(args) == 1:
            return function(map(_ordered, args[0]), **kwargs)
        return function(*map(_ordered, args), **kwargs)

    return applied


def evaluated(function: Callable[..., Any], text: Any, *scopes: Any) -> Any:
    """Return what the tests' `eval` or `exec` makes of a text; one that the candidate wrote is evaluated in the candidate's sandbox."""
    if not Channel.heard or (isinstance(text, str) and text in Channel.texts):
        Channel.checks += function.__name__ == "exec"
        return function(text, *scopes)
    scope = scopes[0] if scopes else None
    shown = type(scope) is dict and "__builtins__" not in scope and can_be_told(scope)
    return ask("apply", "builtins", function.__name__, (text, share(scope)) if shown else (text,), {})


def same(one: Any, other: Any) -> bool:
    """Return whether two names stand for one object."""
    if type(one) is Remote and type(other) is Remote:
        a, b = map(_number_of, (one, other))
        # Which one it is of those that the tests have used is for the candidate to say: it has them.
        known = all(each._used or each._made is None for each in (one, other))  # noqa: SLF001
        return one is other or (a == b and (known or equal(one, other)))
    if is_sub(one) and is_sub(other):
        return bool(one._remote._target == other._remote._target and one == other)  # noqa: SLF001
    return one is other


def _number_of(remote: Remote) -> Any:
    """Return what tells an object from others, whatever name it has."""
    kind, name = remote._target  # noqa: SLF001
    if kind != "name":
        return remote._target  # noqa: SLF001
    found = ask("fetch", name)
    return found._target if type(found) is Remote else None  # noqa: SLF001


def kind_of(thing: Any) -> Any:
    """Return the class of a thing; for an object of the candidate's, its class there."""
    if is_sub(thing):
        thing = thing._remote  # noqa: SLF001
    return ask("class", thing) if type(thing) is Remote else type(thing)


def said(error: Any = None) -> Any:
    """Return an exception that the tests raise by themselves, marked as such."""
    error = sys.exc_info()[1] if error is None else error
    error = error() if isinstance(error, type) else error
    if not is_candidates(error) and not isinstance(error, AssertionError):
        Channel.checks += 1
        error.said_by_the_tests = True
    return error


_MISSING = object()


def next_item(iterator: Any, default: Any = _MISSING) -> Any:
    """Return the next item. The end of a candidate's iterator becomes an error: it must not end the tests' own iteration."""
    if type(iterator) is not Remote:
        return next(iterator) if default is _MISSING else next(iterator, default)
    try:
        return iterator.__next__()
    except StopIteration:
        if default is not _MISSING:
            return default
        raise CandidateError("the candidate's iterator has no more items") from None


class _Classes:
    """The candidate's classes as types, which `match` needs."""

    def __getattr__(self, name: str) -> Any:
        theirs: Any = Remote(name, is_name=True)
        told = ask("apply", "builtins", "hasattr", (theirs, "__match_args__"), {}) is True
        kind = type("Type", (type,), {"__instancecheck__": lambda _, thing: isinstance(thing, theirs)})
        return kind(name, (), {"__match_args__": ask("get", theirs, "__match_args__") if told else ()})


HELPERS: dict[str, Any] = {
    "classes": _Classes(),
    "value": value,
    "frozen": frozen,
    "check": check,
    "truth": truth,
    "number": number,
    "float": as_float,
    "max": _of_numbers(max),
    "min": _of_numbers(min),
    "evaluated": evaluated,
    "same": same,
    "type": kind_of,
    "said": said,
    "next": next_item,
}
"""By the names with which rewritten tests call them."""

_APPLIED = {
    "dataclasses": ("asdict", "astuple", "replace", "is_dataclass"),
    "copy": ("copy", "deepcopy"),
    "pickle": ("loads", "dumps"),
    "inspect": ("isgenerator", "isgeneratorfunction", "iscoroutinefunction", "iscoroutine", "isclass", "isfunction", "signature"),
}  # fmt: skip


def apply_where_objects_are(names: Collection[str]) -> None:
    """Have those of the named functions that look into objects do so in the candidate's sandbox."""
    for module, functions in _APPLIED.items():
        for name in functions:
            if name in names:
                known = importlib.import_module(module)
                setattr(known, name, _applied(module, name, getattr(known, name)))


def _applied(module: str, name: str, function: Any) -> Any:
    def applied(thing: Any, *args: Any, **kwargs: Any) -> Any:
        # A pickle runs what it names: one that comes when the candidate has been heard is read where the candidate is.
        if type(thing) is Remote or is_sub(thing) or (module == "pickle" and Channel.heard):
            return ask("apply", module, name, (thing, *args), kwargs)
        return function(thing, *args, **kwargs)

    return applied
