"""A run of a comparison is trained to its end, or resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import sections

from kapelle.comparison import running
from kapelle.comparison.contenders import Run
from kapelle.comparison.running import take_up
from kapelle.runs.reader import read_evaluations, read_metrics, read_status
from kapelle.setup.recipe import Recipe, resolve, to_yaml
from kapelle.training.trainer import Trainer


def untimed(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)]


def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    config = resolve(sections(evaluation={"problems": 4}))
    take_up(to_yaml(config), {}, str(tmp_path / "whole"))
    with Trainer(config, run_dir=tmp_path / "stopped") as trainer:
        trainer.evaluate()
        next(trainer.steps())
        trainer.save()
    assert read_status(tmp_path / "stopped").state == "interrupted"
    take_up(to_yaml(config), {}, str(tmp_path / "stopped"))
    assert read_status(tmp_path / "stopped").state == "finished"
    assert [row["step"] for row in untimed(tmp_path / "stopped")] == [1, 2, 3]
    assert untimed(tmp_path / "stopped") == untimed(tmp_path / "whole")
    assert read_evaluations(tmp_path / "stopped") == read_evaluations(tmp_path / "whole")


def test_progress_is_reported_before_the_first_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    recipe = Recipe(resolve(sections(training={"steps": 3})), {})
    runs = [Run("grpo", recipe, tmp_path / "one"), Run("rloo", recipe, tmp_path / "two")]
    monkeypatch.setattr(running, "FIRST_WORD", 0.0)
    monkeypatch.setattr(running, "LONGEST_SILENCE", 0.0)
    look = running._Progress(runs, said.append, 0.0)
    look()
    assert said[-1].endswith("the first runs are being prepared")
    with Trainer(recipe.config, run_dir=tmp_path / "one") as trainer:
        next(trainer.steps())
        look()
        look()
    assert len(said) == 2
    assert said[-1].endswith("steps so far: grpo seed 0 1/3")
