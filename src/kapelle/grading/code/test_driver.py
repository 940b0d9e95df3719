"""Runs test programs beside the candidate in one process, and writes how each went.

Nothing here is trusted: the candidate can change whatever the tests use, and write verdicts itself. Each test is a file `test_0.py`, …, which
runs after `setup.py` with the names of `solution.py`. One line of standard input says what to run: `[token, count, modules]`. Each line of
standard output is the token and `[test, status, explanation]`. Standard library only: the file is copied into sandboxes unchanged.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any


def imported(program: str) -> set[str]:
    """Return the modules that a test imports at its top, without the candidate's; these must exist."""
    nodes = ast.parse(program).body
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name for name in names if name.partition(".")[0] != "solution"}


def serve() -> None:
    """Run the tests that standard input names."""
    sys.setrecursionlimit(10_000)
    token, count, modules = json.loads(sys.stdin.readline())
    reports = os.fdopen(os.dup(1), "w")

    def report(index: int, status: str, explanation: str = "") -> None:
        reports.write(f"{token} {json.dumps([index, status, explanation[:500]])}\n")
        reports.flush()

    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            report(0, "broken", f"the tests import `{name}`, which is not installed: {error}")
            return
    try:
        names = dict(vars(importlib.import_module("solution")))
        exec(compile(Path("setup.py").read_text(encoding="utf-8"), "setup.py", "exec"), names)  # noqa: S102
    except BaseException as error:  # noqa: BLE001 (the boundary to programs that may raise anything)
        for index in range(count):
            report(index, "error", f"{type(error).__name__}: {error}")
        return
    for index in range(count):
        report(index, *_outcome(f"test_{index}.py", names))


def _outcome(file: str, names: dict[str, Any]) -> tuple[str, str]:
    try:
        _run(file, names)
    except AssertionError as error:
        return "failed", f"{error}" or "the assertion does not hold"
    except SystemExit as error:
        return (
            ("passed", "") if error.code in (None, 0) else ("failed", f"the test ended with {error.code!r}")
        )
    except BaseException as error:  # noqa: BLE001 (the boundary to programs that may raise anything)
        return "error", f"{type(error).__name__}: {error}"
    return "passed", ""


def _run(file: str, names: dict[str, Any]) -> None:
    """Run a program, and what pytest and unittest would find in it. Raises AssertionError where a test case fails."""
    text = Path(file).read_text(encoding="utf-8")
    # `unittest.main()` looks for its tests there.
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(module).update({**names, "__name__": "__main__", "__file__": file})
    exec(compile(text, file, "exec"), vars(module))  # noqa: S102
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
    own = {name: found for name, found in vars(module).items() if found is not names.get(name)}
    for name, found in own.items():
        is_test = name.startswith("test") and inspect.isfunction(found) and name not in called
        if is_test and not inspect.signature(found).parameters:
            found()
    suite = unittest.TestSuite(
        unittest.defaultTestLoader.loadTestsFromTestCase(found)
        for found in own.values()
        if isinstance(found, type) and issubclass(found, unittest.TestCase)
    )
    result = suite.run(unittest.TestResult())
    for _, said in (*result.failures, *result.errors):
        raise AssertionError(said.strip().splitlines()[-1])
