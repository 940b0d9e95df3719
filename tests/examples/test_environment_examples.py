"""The examples of environments run, and what they show is true."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from kapelle.environments.sandbox.bubblewrap import Bubblewrap

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_program_is_repaired_in_its_second_attempt(
    sandbox: Bubblewrap, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runpy.run_path(str(EXAMPLES / "repair_code.py"))["main"]() == 1.0
    said = capsys.readouterr().out
    assert "Tests that are not shown to you: not all passed." in said
    assert "largest(9, 2, 3)" not in said


def test_an_agent_searches_calculates_and_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(str(EXAMPLES / "use_tools.py"))["main"]() == 1.0
    said = capsys.readouterr().out
    assert "--- tool\n206\n--- solver" in said
    assert "reward 1.0, calls ['search', 'calculator', 'calculator'], faults 1" in said


def test_every_environment_without_data_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "every_environment.py"))["main"]()
    said = capsys.readouterr().out
    assert said.count("== ") == 8
    assert said.count("rewards: solver 1\n") == 5  # every question's script is right
    assert "rewards: first 1, second -1" in said
