"""Run test programs and the candidate in one process and write the outcome of each test.

The results of this process are not trusted: the candidate can change everything that the tests use and can write verdicts
itself. Each test is a file (`test_0.py`, …) that runs after `setup.py` with the names of `solution.py`. Standard input is one
line with the instructions `[token, count, modules]`. Each line of standard output contains the token and `[test, status,
explanation]`. This file uses only the standard library, because it is copied into sandboxes unchanged.
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
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any


def imported(program: str) -> set[str]:
    """Return the modules that a test imports at the top level, except the candidate; these modules must be installed."""
    nodes = ast.parse(program).body
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name for name in names if name.partition(".")[0] != "solution"}


def serve() -> None:
    """Run the tests that the line on standard input describes."""
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
        names = _run("setup", "setup.py", vars(importlib.import_module("solution")))
    except BaseException as error:  # noqa: BLE001 (the boundary to programs that may raise anything)
        for index in range(count):
            report(index, "error", f"{type(error).__name__}: {error}")
        return
    for index in range(count):
        report(index, *_outcome(f"test_{index}.py", names))


def _run(name: str, file: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a program as a module with the given initial names, and return the names of the module at the end."""
    # `unittest.main()` looks for its tests in the module `__main__`.
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update({key: value for key, value in names.items() if not key.startswith("__")})
    SourceFileLoader(name, file).exec_module(module)
    return vars(module)


def _outcome(file: str, names: dict[str, Any]) -> tuple[str, str]:
    try:
        _run_what_runners_find(file, names, _run("__main__", file, names))
    except AssertionError as error:
        return "failed", f"{error}" or "the assertion does not hold"
    except SystemExit as error:
        return (
            ("passed", "") if error.code in (None, 0) else ("failed", f"the test ended with {error.code!r}")
        )
    except BaseException as error:  # noqa: BLE001 (the boundary to programs that may raise anything)
        return "error", f"{type(error).__name__}: {error}"
    return "passed", ""


def _run_what_runners_find(file: str, names: dict[str, Any], found: dict[str, Any]) -> None:
    """Run the functions and classes that pytest and unittest would run.

    Raises AssertionError if a test case of unittest fails.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    own = {name: value for name, value in found.items() if value is not names.get(name)}
    for name, value in own.items():
        is_test = name.startswith("test") and inspect.isfunction(value) and name not in called
        if is_test and not inspect.signature(value).parameters:
            value()
    suite = unittest.TestSuite(
        unittest.defaultTestLoader.loadTestsFromTestCase(value)
        for value in own.values()
        if isinstance(value, type) and issubclass(value, unittest.TestCase)
    )
    result = suite.run(unittest.TestResult())
    for _, said in (*result.failures, *result.errors):
        raise AssertionError(said.strip().splitlines()[-1])
