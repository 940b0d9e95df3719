"""Runs inside the candidate's sandbox: imports `solution.py` and answers one call at a time.

Nothing here is trusted by anyone: the solution shares this process and may take it over. It can then only
answer for itself, as it may anyway. A request is one line, a typed value:

    (number, "call", target, args, kwargs) | (number, "get", target, name) | (number, "set", target, name, value)
    (number, "values", names): those that are plain values  (number, "state", target): its class and attributes, or None
    (number, "is of", class, target) | (number, "contains", target, item) | (number, "leave", target, type names, text)
    (number, "aoperate", target, name, args) | (number, "anext", target): the next item of an asynchronous iterator
    (number, "iterate", target) | (number, "take", iterator, count): its next items
    (number, "await", target) | (number, "truth", target) | (number, "operate", target, name, args): a method such as `__len__`

A reply carries the number of the last message:

    (number, "value", value, changed): `changed` are the arguments that a call changed in place, by place or name; the tests decide whether they take them
    (number, "error", type names, text, attributes): those of the class and of what it derives from
    (number, "callback", function, args, kwargs): a function of the tests is called; the next message is its result,
    (number, "returned", value) or (number, "raised", type name, text), or another request before it

Standard library and the encoding only: both files are copied into sandboxes as they stand.
"""

from __future__ import annotations

import builtins
import importlib
import os
from collections.abc import Callable
from itertools import islice
from typing import Any, BinaryIO

from kapelle.grading.code.collected import mapped
from kapelle.grading.code.values import Callback, Reference, ValueFault, decode, encode, said_by


def serve() -> None:
    """Answer requests from standard input on standard output until it ends."""
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as replies:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        Conversation(requests, replies).go_on()


class Conversation:
    """The two ends of the conversation with the referee."""

    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests = requests
        self._replies = replies
        self._solution = Solution(self)
        self._number = 0

    def go_on(self) -> list[Any]:
        """Answer requests until the result of a callback arrives, and return it; empty at the end."""
        for line in self._requests:
            number, operation, *rest = decode(line)
            self._number = number
            if operation in ("returned", "raised"):
                return [operation, *rest]
            self._answer(operation, *rest)
        return []

    def _answer(self, operation: str, target: Any, *rest: Any) -> None:
        solution = self._solution
        try:
            given = [solution.inside(item) for item in rest]
            before = _mutable(given) if operation == "call" else {}
            value = solution.answer(operation, solution.inside(target), given)
            after = _mutable(given) if before else before
            changed = {place: after[place][1] for place in before if before[place][0] != after[place][0]}
            self._say("value", value, changed)
        except BaseException as error:  # noqa: BLE001 (the boundary to a program that may raise anything)
            names = tuple(kind.__name__ for kind in type(error).__mro__[:16])
            self._say("error", names, said_by(error), _shown(error))

    def _say(self, *reply: Any) -> None:
        text = encode((self._number, *reply), self._solution.keep)
        self._replies.write(text.encode() + b"\n")
        self._replies.flush()

    def call_back(self, function: Callback, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of the tests and return what it returns, or raise what it raises."""
        self._say("callback", function, list(args), kwargs)
        result = self.go_on()
        if not result:
            raise SystemExit
        if result[0] == "returned":
            return self._solution.inside(result[1])
        kind = getattr(builtins, result[1], None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = RuntimeError
        raise kind(result[2])


def _mutable(given: list[Any]) -> dict[int | str, tuple[str, Any]]:
    """Return the arguments of a call that can be changed in place, by place or name, with their texts."""
    args, kwargs = given
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return {
        place: (encode(value, id), value)
        for place, value in places
        if isinstance(value, (list, dict, set, bytearray))
    }


class Solution:
    """The candidate's module, imported at the first request, and the objects that stay here."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._module: Any = None

    def keep(self, value: Any) -> int:
        """Return the number under which an object can be named from outside."""
        number = self._numbers.setdefault(id(value), len(self._kept))
        if number == len(self._kept):
            self._kept.append(value)
        return number

    def inside(self, value: Any) -> Any:
        """Return a value with the objects and functions that its references stand for."""
        if isinstance(value, Callback):
            return lambda *args, **kwargs: self._conversation.call_back(value, args, kwargs)
        if isinstance(value, Reference):
            return self._kept[value.number]
        return mapped(self.inside, value)

    def answer(self, operation: str, target: Any, rest: list[Any]) -> Any:
        """Call, read, set, iterate or await what a request names."""
        if self._module is None:
            self._module = importlib.import_module("solution")
        if operation == "values":
            return {
                name: value for name in target if _is_plain(value := vars(self._module).get(name, _nothing))
            }
        if operation == "leave":
            return _leave(target, self._exception(*rest))
        if isinstance(target, str):
            target = self._named(target)
        return _OPERATIONS[operation](target, *rest)

    def _exception(self, names: list[str], text: str) -> BaseException:
        """Return an exception of the tests' as the solution knows it."""
        for name in names:
            kind = vars(self._module).get(name, getattr(builtins, name, None))
            if isinstance(kind, type) and issubclass(kind, BaseException):
                return kind(text)
        return Exception(text)

    def _named(self, name: str) -> Any:
        """Return what the solution calls so: where a class `Solution` holds all functions, a method of a new one."""
        known = vars(self._module)
        if name not in known and hasattr(known.get("Solution"), name):
            return getattr(known["Solution"](), name)
        return known[name]


def _operate(target: Any, name: str, args: list[Any]) -> Any:
    method = getattr(type(target), name, None)
    if method is None and name.startswith("__i"):
        # `x += y` is `x = x + y` where the class says no more.
        method = getattr(type(target), f"__{name[3:]}", None)
    if method is None:
        raise TypeError(f"an object of {type(target).__name__} has no {name}")
    return method(target, *args)


_nothing = object()


def _is_plain(value: Any) -> bool:
    try:
        return bool(encode(value)) and not isinstance(value, type)
    except ValueFault:
        return False


def _shown(error: BaseException) -> dict[str, Any]:
    """Return the attributes of an exception that are plain values."""
    found = {name: value for name, value in list(vars(error).items())[:16] if _is_plain(value)}
    return found if all(type(name) is str for name in found) else {}


def _state(target: Any) -> Any:
    """Return the class and the attributes of an object; None where they are no plain values, or large."""
    names = getattr(target, "__dataclass_fields__", None) or getattr(target, "__dict__", {})
    attributes = {name: getattr(target, name, None) for name in names if not name.startswith("__")}
    state = [type(target).__name__, attributes]
    return state if attributes and _is_plain(state) and len(encode(state)) <= LARGEST_STATE else None


LARGEST_STATE = 20_000
"""Characters of what an object shows of itself."""


def _leave(target: Any, error: BaseException) -> Any:
    return type(target).__exit__(target, type(error), error, None)


def _contains(target: Any, item: Any) -> bool:
    return item in target


def _run(awaited: Any) -> Any:
    import asyncio

    async def wait() -> Any:
        return await awaited

    # One loop for the whole life: what is awaited in parts, a generator, belongs to it.
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0].run_until_complete(wait())


_loops: list[Any] = []


def _next(iterator: Any) -> list[Any]:
    try:
        return [_run(type(iterator).__anext__(iterator))]
    except StopAsyncIteration:
        return []


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, args, kwargs: target(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "iterate": iter,
    "take": lambda iterator, count: list(islice(iterator, count)),
    "await": _run,
    "operate": _operate,
    "aoperate": lambda target, name, args: _run(_operate(target, name, args)),
    "anext": _next,
    "contains": _contains,
    "is of": lambda kind, target: kind in type(target).__mro__,
    "state": _state,
    "truth": bool,
}
