"""Every benchmark that is listed can be run without arguments."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from benchmarks.__main__ import BENCHMARKS

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_has_a_function_run_that_needs_nothing(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    [run] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    needed = len(run.args.args) + len(run.args.posonlyargs) - len(run.args.defaults)
    assert (needed, len(run.args.kwonlyargs)) == (0, 0)
