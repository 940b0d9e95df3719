"""Runs inside the tests' sandbox: runs test programs, which call the candidate by message.

Each test is a file `test_0.py`, …, run after a copy of `setup.py`'s names. A name that the tests use and
nobody defines is the candidate's: using it sends a message and waits for the reply. What comes back is of
built-in types, or a `Remote` that equals nothing and is neither true nor false. Messages are one line each,
typed values:

    ("call", target, args, kwargs) | ("get", target, name) | ("set", target, name, value)
    ("result", test, "passed" | "failed" | "error", explanation) | ("done",) | ("broken", explanation)

Standard library and the encoding only: both files are copied into sandboxes as they stand.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any, BinaryIO

from kapelle.grading.code.values import Reference, decode, encode


class _Channel:
    """The two ends of the conversation with the referee, open while `serve` runs."""

    requests: BinaryIO
    replies: BinaryIO


class CandidateError(Exception):
    """What the candidate raised, where it is no built-in exception."""


class Remote:
    """An object, function or name of the candidate's. Compares by identity, has no truth value."""

    __slots__ = ("_target",)

    def __init__(self, target: Any) -> None:
        object.__setattr__(self, "_target", target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 (a call, passed on)
        return _ask(
            "call", self._target, [_outside(a) for a in args], {k: _outside(v) for k, v in kwargs.items()}
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask("get", self._target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask("set", self._target, name, _outside(value))

    def __bool__(self) -> bool:
        raise TypeError("the candidate returned an object of its own where a value belongs")


def _outside(value: Any) -> Any:
    """Return a value with the targets of the remote objects in it."""
    if isinstance(value, Remote):
        return object.__getattribute__(value, "_target")
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(_outside(item) for item in value)
    if isinstance(value, dict):
        return {_outside(key): _outside(item) for key, item in value.items()}
    return value


def _here(value: Any) -> Any:
    """Return a decoded value with a remote object for each reference in it."""
    if isinstance(value, Reference):
        return Remote(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(_here(item) for item in value)
    if isinstance(value, dict):
        return {_here(key): _here(item) for key, item in value.items()}
    return value


def _say(*message: Any) -> None:
    _Channel.requests.write(encode(message).encode() + b"\n")
    _Channel.requests.flush()


def _ask(*message: Any) -> Any:
    _say(*message)
    kind, *rest = decode(_Channel.replies.readline())
    if kind == "value":
        return _here(rest[0])
    error = getattr(builtins, rest[0], None)
    if isinstance(error, type) and issubclass(error, Exception) and not issubclass(error, AssertionError):
        raise error(rest[1])
    raise CandidateError(f"{rest[0]}: {rest[1]}")


def missing_names(programs: list[str]) -> list[str]:
    """Return the names that programs use and neither define nor import, built-in ones left out."""
    nodes = [node for program in programs for node in ast.walk(ast.parse(program))]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    defined |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return sorted(used - defined - set(vars(builtins)))


def _namespace(programs: list[str], candidates_own: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in missing_names(programs):
        # A module that a test forgot to import is the real one, never the candidate's.
        is_module = name in sys.stdlib_module_names
        found[name] = importlib.import_module(name) if is_module else Remote(name)
    return {**found, **{name: Remote(name) for name in candidates_own}}


def run_all(count: int, candidates_own: list[str]) -> None:
    """Run the setup and the tests, and say how each went."""
    names = ["setup.py", *(f"test_{index}.py" for index in range(count))]
    programs = [Path(name).read_text(encoding="utf-8") for name in names]
    try:
        namespace = _namespace(programs, candidates_own)
    except SyntaxError as error:
        _say("broken", f"a test is not a program: {error}")
        return
    defined = runpy.run_path("setup.py", init_globals=namespace, run_name="setup")
    namespace.update({name: value for name, value in defined.items() if not name.startswith("__")})
    namespace.update({name: Remote(name) for name in candidates_own})
    for index in range(count):
        try:
            runpy.run_path(f"test_{index}.py", init_globals=namespace, run_name="test")
        except AssertionError as error:
            _say("result", index, "failed", f"{error}"[:500] or "the assertion does not hold")
        except Exception as error:  # noqa: BLE001 (a test that raises has not passed, whatever it raises)
            _say("result", index, "error", f"{type(error).__name__}: {error}"[:500])
        else:
            _say("result", index, "passed", "")
    _say("done")


def serve() -> None:
    """Run the tests that the arguments name (their number, and names that are the candidate's)."""
    with os.fdopen(os.dup(0), "rb") as _Channel.replies, os.fdopen(os.dup(1), "wb") as _Channel.requests:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        run_all(int(sys.argv[1]), sys.argv[2:])
