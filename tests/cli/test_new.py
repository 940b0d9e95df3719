"""`kapelle new`: what it writes passes its own test, the linters and `validate`, and trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kapelle.cli import main
from kapelle.cli.arguments import KINDS
from kapelle.setup.recipe import load_recipe
from kapelle.training.trainer import Trainer

SMALL = (
    "warmup=null",
    "training.steps=2",
    "training.tasks_per_step=2",
    "algorithm.group_size=2",
    "model.embedded.layers=1",
)


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that `kapelle new` has made, as the working directory."""
    if request.param == "app":
        pytest.importorskip("starlette")
    monkeypatch.chdir(tmp_path)
    assert main(["new", request.param, f"made_{request.param}"]) == 0
    folder = tmp_path / f"made_{request.param}"
    monkeypatch.chdir(folder)
    # Recipes of programs say `python`, which in an environment that is active is this one.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_it_passes_the_linters(made: Path) -> None:
    pytest.importorskip("ruff", reason="ruff is not installed: it comes with `make check`")
    for words in (["check", "--isolated"], ["format", "--isolated", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "."], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


def test_it_is_ready_to_train(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", f"{made.name}.yaml"]) == 0
    assert "is ready to train" in capsys.readouterr().out


@pytest.mark.sample(2)
@pytest.mark.slow
def test_two_steps_of_training(made: Path) -> None:
    with Trainer(load_recipe(f"{made.name}.yaml", settings=SMALL).config) as trainer:
        assert [step.number for step in trainer.steps()] == [1, 2]
