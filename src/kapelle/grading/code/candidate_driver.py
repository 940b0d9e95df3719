"""Runs inside the candidate's sandbox: imports `solution.py` and answers one call at a time.

Nothing here is trusted by anyone: the solution shares this process and may take it over. It can then only
answer for itself, as it may anyway. A request is one line, a typed value:

    (number, "call", target, args, kwargs) | (number, "get", target, name) | (number, "set", target, name, value)
    (number, "iterate", target) | (number, "take", iterator, count): its next items
    (number, "await", target) | (number, "truth", target) | (number, "operate", target, name, args): a method such as `__len__`

A reply carries the number of the last message:

    (number, "value", value, changed): `changed` are the arguments that a call which returns None changed in place, by place
    or name; the tests decide whether they take them
    (number, "error", type names, text): those of the class and of what it derives from
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

from kapelle.grading.code.values import Callback, Reference, decode, encode, said_by


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
            after = _mutable(given) if before and value is None else before
            changed = {place: after[place][1] for place in before if before[place][0] != after[place][0]}
            self._say("value", value, changed)
        except BaseException as error:  # noqa: BLE001 (the boundary to a program that may raise anything)
            names = tuple(kind.__name__ for kind in type(error).__mro__[:16])
            self._say("error", names, said_by(error))

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
        if isinstance(value, (list, tuple, set, frozenset)):
            return type(value)(self.inside(item) for item in value)
        if isinstance(value, dict):
            return {self.inside(key): self.inside(item) for key, item in value.items()}
        return value

    def answer(self, operation: str, target: Any, rest: list[Any]) -> Any:
        """Call, read, set, iterate or await what a request names."""
        if self._module is None:
            self._module = importlib.import_module("solution")
        if isinstance(target, str):
            target = vars(self._module)[target]
        return _OPERATIONS[operation](target, *rest)


def _operate(target: Any, name: str, args: list[Any]) -> Any:
    method = getattr(type(target), name, None)
    if method is None:
        raise TypeError(f"an object of {type(target).__name__} has no {name}")
    return method(target, *args)


def _run(awaited: Any) -> Any:
    import asyncio

    async def wait() -> Any:
        return await awaited

    return asyncio.run(wait())


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, args, kwargs: target(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "iterate": iter,
    "take": lambda iterator, count: list(islice(iterator, count)),
    "await": _run,
    "operate": _operate,
    "truth": bool,
}
