"""Errors of wrong calls in Python."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kapelle
from kapelle.algorithms.grpo import GRPO
from kapelle.cli import main
from kapelle.environments.arithmetic import Arithmetic
from kapelle.workflows.solo import Solo

trainer: Any = kapelle.Trainer
REST: dict[str, Any] = {"workflow": Solo(), "algorithm": GRPO()}


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (lambda: trainer(enviroment=Arithmetic(), **REST), "Did you mean 'environment'?"),
        (lambda: trainer(environment=Arithmetic, **REST), "environment=Arithmetic(…)"),
        (lambda: trainer(environment="arithmetic", **REST), "`environment: {name: arithmetic}`"),
        (lambda: trainer(environment=Solo(), **REST), "`start`"),
        (lambda: trainer(environment=Arithmetic(), steps=3, **REST), "`training={'steps': …}`"),
        (lambda: trainer("demo"), "Trainer.from_recipe('demo')"),
        (lambda: trainer.from_recipe("demo", {"training.steps": 3}), "as a string"),
    ],
)
def test_a_trainer_raises_an_error_for_arguments_that_it_cannot_use(
    wrong: Callable[[], Any], word: str
) -> None:
    with pytest.raises(kapelle.ConfigError) as caught:
        wrong()
    assert word in str(caught.value)


def test_an_error_names_the_setting_as_it_was_given() -> None:
    said = r"epochs.*.*\(`num_train_epochs` is read as `training"
    with pytest.raises(kapelle.ConfigError, match=said), pytest.warns(UserWarning, match="num_train_epochs"):
        trainer(num_train_epochs=2, environment=Arithmetic(), **REST)
    with pytest.raises(kapelle.ConfigError, match=said), pytest.warns(UserWarning, match="num_train_epochs"):
        trainer.from_recipe("demo", "num_train_epochs=2")


TEAM: dict[str, Any] = {"environment": Arithmetic(), **REST}
from_recipe: Any = kapelle.Trainer.from_recipe


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a run `mine`, a folder that is none, and recipes."""
    monkeypatch.chdir(tmp_path)
    Path("foreign").mkdir()
    Path("foreign/x.txt").write_text("not ours")
    Path("plain.yaml").write_text("environment: {name: arithmetic}\n")
    trainer(run_dir="mine", **TEAM).close()
    shutil.copytree("mine", "mine 2")
    return tmp_path


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (lambda: from_recipe("demo", resume=True), "run_dir"),
        (lambda: from_recipe("demo", run_dir="mine"), "resume=True"),
        (lambda: from_recipe("mine"), "run"),
        (lambda: from_recipe(3), "3"),
        (lambda: from_recipe("demo", overlays="x.yaml"), "overlays=['x.yaml']"),
        (lambda: from_recipe("demo", "training.step=3"), "(set in the call). Did you mean 'steps'?"),
        (lambda: from_recipe("demo", runs_dir="x"), "Did you mean 'run_dir'?"),
        (lambda: from_recipe("demo", learning_rate=1.0), "learning_rate"),
        (lambda: trainer.from_run("mine", resumes=True), "Did you mean 'resume'?"),
        (lambda: trainer(run_dir="foreign", resume=True, **TEAM), "foreign"),
        (lambda: trainer(**TEAM).train("many"), "'many'"),
        (lambda: trainer(**TEAM).evaluate(-1), "-1"),
        (lambda: kapelle.blame("mine", "evaluation.problms=3"), "Did you mean 'problems'?"),
    ],
)
@pytest.mark.usefixtures("place")
def test_a_wrong_call_is_an_error_that_names_the_argument(wrong: Callable[[], Any], word: str) -> None:
    with pytest.raises(kapelle.KapelleError) as caught:
        wrong()
    assert word in str(caught.value)


@pytest.mark.usefixtures("place")
def test_an_arena_does_not_write_into_a_folder_with_other_files() -> None:
    pytest.importorskip("pyspiel")
    with pytest.raises(kapelle.KapelleError, match="foreign"):
        kapelle.arena("nash", "random", environment="kuhn_poker", output="foreign")


def test_errors_of_a_command_name_its_options(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo", "--run-dir", str(place / "mine")]) == 2
    assert "Continue it with --resume, or choose another --run-dir" in capsys.readouterr().err
    assert main(["train", "demo", "training.step=3"]) == 2
    assert "(set on the command line)" in capsys.readouterr().err
