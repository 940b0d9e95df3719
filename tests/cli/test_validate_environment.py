"""`kapelle validate ENV` holds an environment to what training needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Kapelle


def test_a_sound_environment_is_fit_for_training(kapelle: Kapelle) -> None:
    said = kapelle("validate", "multi_step", "environment.difficulty=[2,3]")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[-1] == "multi_step is fit for training."
    assert len(lines) == 14
    assert all(line.startswith("ok  ") for line in lines[:-1])


OWN = """
from typing import Literal
from kapelle.environments.procedural import MultiStep

class Generous(MultiStep):
    name: Literal["generous_environment:Generous"] = "generous_environment:Generous"
    extraction: tuple[str, ...] = ("last_number",)

    @property
    def reward_range(self):
        return (0.0, 0.5)
"""


def test_a_faulty_environment_of_ones_own_is_named_with_its_fault(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("generous_environment.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    said = kapelle("validate", "generous_environment:Generous")
    assert said.code == 2
    assert "has the reward {'solver': 1.0}" in said.out
    assert said.err == (
        "kapelle: `generous_environment:Generous` is not fit for training yet: rewards, gold. See above.\n"
    )
