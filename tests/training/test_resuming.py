"""What a resumed run may say otherwise: each such setting changes no result, or is said and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.observers import Reported
from tests.support.resumed import trained
from tests.support.tiny import same_bits, sections

from kapelle.errors import RunDirectoryError
from kapelle.runs import checkpoint
from kapelle.runs.reader import read_metrics, read_provenance
from kapelle.setup.recipe import resolve
from kapelle.training.trainer import Trainer

STEPS = 4

OTHERWISE: dict[str, Any] = {
    "description": "in other words",
    "training.steps": 3,
    "training.epochs": 0.75,  # three steps of two of eight tasks
    "training.max_failed_share": 0.9,
    "training.parity_tolerance": 1.0,
    "training.non_finite": "skip",
    "environment.timeout": 77.0,
    "episode.timeout": 777.0,
    "episode.environment_workers": 2,
    "engine.timeout": 77.0,
    "grader.timeout": 77.0,
    "record": {"credit_episodes": 0},
    "episodes": {"keep": 1, "keep_evaluations": 1},
    "evaluation": {"every": 1, "problems": 5, "problems_while_training": 3, "greedy": False},
    "checkpoint": {"every": 1, "keep": 1, "best": "success", "best_is": "lowest"},
    "trackers": [{"name": "tensorboard"}],
}
"""Another value of each setting of a run that no result depends on."""

"""Settings of plug-ins that no result depends on but by giving up what takes too much."""


def settings(key: str = "", value: Any = None, **over: Any) -> dict[str, Any]:
    base = sections(
        environment={"name": "tests.support.plugins:Digest", "tasks": 8},
        training={"steps": STEPS, "tasks_per_step": 2},
        evaluation={"problems": 3, "before_and_after": False},
        checkpoint={"every": 2, "keep": 9},
    )
    found = {**base, **over}
    section, _, name = key.partition(".")
    if name:
        before = found.get(section, {"name": "local"} if section == "engine" else {})
        return {**found, section: {**before, name: value}}
    return {**found, section: value} if section else found


def last(run: Path) -> Any:
    folder = checkpoint.list_checkpoints(run / "checkpoints")[-1]
    assert folder.name == f"{STEPS:08d}"
    return checkpoint.load(folder)["train"]


def rows(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(settings(), tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.mark.sample(18)
@pytest.mark.slow
@pytest.mark.parametrize("key", OTHERWISE)
def test_a_setting_that_is_free_changes_no_result(key: str, undisturbed: Path, tmp_path: Path) -> None:
    run, new_messages = tmp_path / "run", Reported("resume")
    if key == "trackers":
        pytest.importorskip("tensorboard")
    with Trainer(resolve(settings(key, OTHERWISE[key])), run_dir=run) as trainer:
        trainer.train(2)
    with Trainer(**settings(), run_dir=run, resume=True, observer=new_messages) as trainer:
        assert trainer.done == 2
        trainer.train()
    assert new_messages.said == []
    assert same_bits(last(run), last(undisturbed))
    assert rows(run) == rows(undisturbed)


def test_a_rate_may_be_lowered_from_here_on_which_is_said_and_kept(undisturbed: Path, tmp_path: Path) -> None:
    run, new_messages = tmp_path / "run", Reported("resume")
    with Trainer(**settings(), run_dir=run, origin={"optimizer.lr": "mine.yaml"}) as trainer:
        trainer.train(2)
    lower = settings(optimizer={"lr": 1e-3})
    given = {"optimizer.lr": "command line"}
    with Trainer(**lower, run_dir=run, resume=True, observer=new_messages, origin=given) as trainer:
        trainer.train()
    assert new_messages.said == ["optimizer.lr was 0.01 and is 0.001 from step 2 on"]
    assert read_provenance(run)["optimizer.lr"] == "command line from step 2 on; 0.01 before"
    assert yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["lr"] == 1e-3
    assert rows(run)[:2] == rows(undisturbed)[:2]
    assert [row["lr/agent_0"] for row in rows(run)] == [1e-2, 1e-2, 1e-3, 1e-3]
    assert not same_bits(last(run), last(undisturbed))


def test_what_the_run_is_may_not_change(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Trainer(**settings(), run_dir=run) as trainer:
        trainer.train(1)
    kept = (run / "config.yaml").read_bytes()
    with pytest.raises(RunDirectoryError, match="another config: seed was 0 and is 3"):
        Trainer(**settings(seed=3), run_dir=run, resume=True)
    assert (run / "config.yaml").read_bytes() == kept
