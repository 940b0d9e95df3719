"""The code in docs/make_your_own.md and in the tutorial on environments works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.workflows.stage import lines, play

from kapelle.cli.new import skeleton
from kapelle.environment import environment_class
from kapelle.rollout.conformance import conform
from kapelle.setup.recipe import load_recipe
from kapelle.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "make_your_own.md").read_text(encoding="utf-8")
WRITTEN = skeleton("environment", "largest")["largest.py"]
TUTORIAL = (ROOT / "docs" / "tutorials" / "own_environment.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files of both pages to the working folder, on the Python path."""
    for text, name in re.findall(r"```(?:python|yaml)\n(# (\S+)\n.*?)```", PAGE + TUTORIAL, re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_tutorial_and_example_show_output_of_kapelle_new(folder: Path) -> None:
    assert (folder / "largest.py").read_text(encoding="utf-8") == f"# largest.py\n{WRITTEN}"
    body = WRITTEN.partition("    difficulty")[2].partition("\n")[2]
    assert body in (ROOT / "examples" / "own_questions.py").read_text(encoding="utf-8")


async def test_tutorial_shows_findings_of_conform(folder: Path) -> None:
    config = load_recipe(str(folder / "mine.yaml")).config
    findings = await conform(config.environment)
    shown = [f"{f.status:2}  {f.name:13} {f.detail}" for f in findings]
    assert [line for line in shown if line not in TUTORIAL] == []


async def test_tutorial_game_conforms_and_leak_is_found(folder: Path) -> None:
    game = environment_class("hints.py:Hints")()
    findings = await conform(game)
    shown = [
        f"{'-  ' if f.status == 'not checked' else f'{f.status:3}'} {f.name:13} {f.detail}" for f in findings
    ]
    assert [line for line in shown if line not in TUTORIAL] == []
    # The most likely mistake: the guesser sees the task.
    leaky = (
        (folder / "hints.py").read_text(encoding="utf-8").replace("is: {self.hint}", "is: {self.task.data}")
    )
    (folder / "leaky.py").write_text(leaky, encoding="utf-8")
    [finding] = [f for f in await conform(environment_class("leaky.py:Hints")()) if f.status == "failed"]
    assert finding.name == "private views"
    assert finding.detail.startswith(
        "'agent_1' observes a secret of 'agent_0' in task train-0 at the start: 'river' in "
    )


def test_training_on_environment(folder: Path) -> None:
    small = ("warmup=null", "training.steps=1", "training.tasks_per_step=2", "algorithm.group_size=2")
    with Trainer.from_recipe(str(folder / "mine.yaml"), *small, "evaluation=null") as trainer:
        [step] = trainer.steps(1)
    assert 0.0 <= step.metrics["return/agent_0"] <= 1.0


async def test_workflow_calls_third_agent_only_if_two_differ(folder: Path) -> None:
    config = load_recipe(str(folder / "mine.yaml")).config
    environment, workflow = config.environment, config.workflow
    task = environment.task("train", 0)
    answer = task.data["answer"]
    gold, bad = str(answer), str((answer + 1) % 10)
    names = ["agent_0", "agent_1", "agent_2"]
    for answers, turns, success in (
        ((gold, gold, bad), 2, 1.0),
        ((gold, bad, gold), 3, 1.0),
        ((gold, bad, bad), 3, 0.0),
    ):
        scripts = {name: lines(text) for name, text in zip(names, answers, strict=True)}
        [episode] = await play(environment, workflow, names, scripts, task)
        assert (len(episode.turns), episode.success) == (turns, success)


def test_train_engine_reports_its_time(folder: Path) -> None:
    small = ("warmup=null", "training.steps=1", "training.tasks_per_step=2", "algorithm.group_size=2")
    named = "train_engine.name=clocked:Clocked"
    with Trainer.from_recipe(str(folder / "mine.yaml"), *small, named, "evaluation=null") as trainer:
        [step] = trainer.steps(1)
    assert step.metrics["update_seconds"] > 0
