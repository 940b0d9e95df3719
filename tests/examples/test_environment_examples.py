"""Run the examples of environments and check what they print."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from kapelle.environments.sandbox.bubblewrap import Bubblewrap

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_repair_code(sandbox: Bubblewrap, capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(str(EXAMPLES / "repair_code.py"))["main"]() == 1.0
    output = capsys.readouterr().out
    assert "Tests that are not shown to you: not all passed." in output
    assert "largest(9, 2, 3)" not in output


def test_use_tools(capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(str(EXAMPLES / "use_tools.py"))["main"]() == 1.0
    output = capsys.readouterr().out
    assert "--- tool\n206\n--- solver" in output
    assert "reward 1.0, calls ['search', 'calculator', 'calculator'], faults 1" in output


def test_every_environment(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "every_environment.py"))["main"]()
    output = capsys.readouterr().out
    assert output.count("== ") == 8
    assert output.count("rewards: solver 1\n") == 5  # one right answer per question environment
    assert "rewards: first 1, second -1" in output
