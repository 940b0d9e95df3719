"""A run of five steps, each with its checkpoint and two with an evaluation: what tests of going back build on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.episode_lines import lines_in
from tests.support.tiny import sections

from kapelle.runs import checkpoint
from kapelle.runs.reader import read_evaluations, read_metrics
from kapelle.training.trainer import Trainer

STEPS = 5


def settings() -> dict[str, Any]:
    return sections(
        training={"steps": STEPS, "tasks_per_step": 2, "max_failed_share": 1.0},
        evaluation={"problems": 3, "problems_while_training": 2, "every": 2},
        checkpoint={"every": 1, "keep": 9},
    )


def train(run: Path, *, resume: bool = False) -> None:
    with Trainer(**settings(), run_dir=run, resume=resume) as trainer:
        trainer.train()


def stop_after(run: Path, step: int) -> None:
    """Train as if the run were killed right after it saved that step."""
    with Trainer(**settings(), run_dir=run) as trainer:
        trainer.evaluate()
        next(taken for taken in trainer.steps() if taken.number == step)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, to read only."""
    run = tmp_path_factory.mktemp("trained") / "run"
    train(run)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def content(run: Path) -> dict[str, Any]:
    """All that a run has come to, times aside."""
    metrics = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)]
    folders = checkpoint.list_checkpoints(run / "checkpoints")
    learned = {folder.name: checkpoint.load(folder) for folder in folders}
    for state in learned.values():
        # The rows hold times, which differ in length; the process draws from its generators for others too.
        del state["loop"]["positions"], state["loop"]["random"]
    latest = (run / "latest").read_text()
    return {
        "m": metrics,
        "e": read_evaluations(run),
        "c": learned,
        "episodes": lines_in(run),
        "latest": latest,
    }


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
