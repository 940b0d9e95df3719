"""Runs inside the candidate's sandbox: imports `solution.py` and answers one call at a time.

Nothing here is trusted by anyone: the solution shares this process and may take it over. It can then only
answer for itself, as it may anyway. A request is one line, a typed value; so is a reply:

    (number, "call", target, args, kwargs) | (number, "get", target, name) | (number, "set", target, name, value)
    (number, "value", value) | (number, "error", type name, text)

Standard library and the encoding only: both files are copied into sandboxes as they stand.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from kapelle.grading.code.values import Reference, decode, encode


def serve() -> None:
    """Answer requests from standard input on standard output until it ends."""
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as replies:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        solution = Solution()
        for line in requests:
            number, operation, target, *rest = decode(line)
            kept = solution.kept
            try:
                value = solution.answer(
                    operation,
                    kept[target.number] if isinstance(target, Reference) else target,
                    [_inside(item, kept) for item in rest],
                )
                reply = encode((number, "value", value), solution.keep)
            except BaseException as error:  # noqa: BLE001 (the boundary to a program that may raise anything)
                reply = encode((number, "error", type(error).__name__, f"{error}"[:500]))
            replies.write(reply.encode() + b"\n")
            replies.flush()


def _inside(value: Any, kept: list[Any]) -> Any:
    """Return a value with the objects that its references stand for."""
    if isinstance(value, Reference):
        return kept[value.number]
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(_inside(item, kept) for item in value)
    if isinstance(value, dict):
        return {_inside(key, kept): _inside(item, kept) for key, item in value.items()}
    return value


class Solution:
    """The candidate's module, imported at the first request, and the objects that stay here."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self._module: Any = None

    def keep(self, value: Any) -> int:
        """Return the number under which an object can be named from outside."""
        self.kept.append(value)
        return len(self.kept) - 1

    def answer(self, operation: str, target: Any, rest: list[Any]) -> Any:
        """Call, read or set what a request names."""
        if self._module is None:
            self._module = importlib.import_module("solution")
        if isinstance(target, str):
            target = vars(self._module)[target]
        if operation == "call":
            return target(*rest[0], **rest[1])
        if operation == "get":
            return getattr(target, rest[0])
        return setattr(target, rest[0], rest[1])
