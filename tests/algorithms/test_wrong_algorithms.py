"""An algorithm whose `build` returns something of a wrong type raises a one-line error before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from kapelle.cli import main
from kapelle.cli.new import skeleton

BUILD = "return self.row(self.name, judge=self.credit)"
SIGNAL = """
class Surprise:
    def gather(self, step, engine):
        return {"surprise": {}}


class Deaf:
    pass


class Short:
    def gather(self, step):
        return {}


"""
WITH = "import dataclasses; return dataclasses.replace(self.row(self.name, judge=self.credit), {})"

WRONG = {
    "a signal's class": (
        "return self.row(self.name, judge=self.credit, needs=(Surprise,))",
        "`needs` contains <class 'kapelle_file_",
        "such as Surprise()",
    ),
    "a signal's name": (
        "return self.row(self.name, judge=self.credit, needs=('surprise',))",
        "`needs` contains 'surprise'",
    ),
    "a number": (
        "return self.row(self.name, judge=self.credit, needs=(3,))",
        "`needs` contains 3",
    ),
    "no gather": (
        "return self.row(self.name, judge=self.credit, needs=(Deaf(),))",
        "`gather`",
    ),
    "no comma": (WITH.format("needs=(Surprise())"), "`needs` is <", "(MySignal(),)"),
    "nothing": ("self.row(self.name, judge=self.credit)", "`build` returns None. Return a kapelle.Algorithm."),
    "a raise": ("return self.row(self.nam)", "`build` raises AttributeError: ", "(rival.py, line"),
    "an unknown argument": ("return self.row(self.name, credits=self.credit)", "`build` raises TypeError: ", "(rival.py, line"),
    "no credit": ("return self.row(self.name)", "no `credit`"),
    "credit's result": (WITH.format("credit={}"), "`credit` is {}"),
    "credit's class": (WITH.format("credit=dict"), "`credit` is <class 'dict'>"),
    "no loss": (WITH.format("policy_loss=None"), "`policy_loss` is None"),
    "the loss by name": (WITH.format("policy_loss='ppo'"), "`policy_loss` is 'ppo'"),
    "memory": (WITH.format("memory={}"), "`memory` is {}"),
    "returns": (WITH.format("returns=1.0"), "`returns` is 1.0"),
    "data": (WITH.format("data='rollout'"), "`data` is 'rollout'"),
    "a group size": (
        "from kapelle.algorithm import Data; " + WITH.format("data=Data(group_size=0.5)"),
        "`data.group_size` is 0.5",
    ),
    "update": (WITH.format("update=2"), "`update` is 2"),
    "a hook's class": (WITH.format("after_update=(Deaf,)"), "`after_update` contains <class"),
    "a check's text": (WITH.format("checks=('two agents',)"), "`checks` contains 'two agents'"),
    "a critic": (
        f"from kapelle.algorithms.signals.critic_values import CriticValues; {BUILD[:-1]}, needs=(CriticValues('ppo'),))",
        "the `critic` of a signal is 'ppo'. Give a kapelle.algorithm.CriticSpec whose `loss` is a function.",
    ),
    "credit that takes less": (
        "return self.row(self.name, judge=lambda groups, signals: {})",
        "`credit` takes (groups, signals), but is called with (groups, signals, earlier).",
    ),
    "a loss that takes less": (
        WITH.format("policy_loss=lambda outputs: None"),
        "`policy_loss` takes (outputs), but is called with (outputs, targets).",
    ),
    "a signal that takes less": (
        f"{BUILD[:-1]}, needs=(Short(),))",
        "`gather` of Short takes (step), but is called with (step, engine).",
    ),
    "a check that takes more": (
        WITH.format("checks=(lambda team, run: None,)"),
        "takes (team, run), but is called with (team).",
    ),
    "a name": (WITH.format("name=None"), "`name` is None"),
}  # fmt: skip
"""Case → the body of `build`, and texts that the error contains."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("wrong", WRONG)
def test_an_invalid_row_is_one_error_line(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build, *says = WRONG[wrong]
    monkeypatch.chdir(tmp_path)
    for file, text in skeleton("algorithm", "rival").items():
        changed = text.replace("class Rival(", f"{SIGNAL}class Rival(").replace(BUILD, build)
        Path(file).write_text(changed, encoding="utf-8")
    assert main(["validate", "rival.yaml"]) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    [line] = said.err.splitlines()
    assert line.startswith("kapelle: Algorithm 'rival.py:Rival'")
    assert [each for each in says if each not in line] == [], line
