"""Runs of several processes on the twin: a sampler beside the learner, workers, `torchrun`, Ray, and other devices on resume."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.test_torchrun import RECIPE
from tests.features.ahead.test_asynchronous import check_ages, check_tasks
from tests.features.ahead.test_asynchronous import settings as asynchronous
from tests.features.ahead.test_queue import PPO, SMALL
from tests.support.killed_ranks import Kill, Way, said, train
from tests.support.killed_runs import Death
from tests.support.tiny import frozen_copy, same_bits
from torch import Tensor

from kapelle import Trainer
from kapelle.cli import main
from kapelle.runs.reader import read_metrics
from kapelle.runs.step_rows import lines_of, stored_steps

Weights = Mapping[str, Mapping[str, Tensor]]

FAST = {"lr": 1e-2, "eps": 1e-2}
"""An optimiser that does not divide by rounding."""


def trained(run: Path, device: str, settings: Mapping[str, Any], stops: Sequence[int] = ()) -> Weights:
    """Train to the end, stopping after so many steps each time; return the weights."""
    model = {**settings["model"], "device": device}
    weights: Weights = {}
    for steps in (*stops, None):
        chosen = {**settings, "model": model, "optimizer": FAST, "checkpoint": {"every": 1}}
        with Trainer(**chosen, run_dir=run, resume=run.exists()) as trainer:
            trainer.train(steps)
            weights = {
                name: {key: tensor.cpu() for key, tensor in frozen_copy(trainer.engine.weights(name)).items()}
                for name in trainer.team.trained
            }
    return weights


def rows(run: Path) -> list[dict[str, float]]:
    """Return the rows of a run without times."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)]


def sampled(run: Path) -> list[list[list[int]]]:
    """Return the tokens of every turn of a run."""
    return [
        [turn["completion_ids"] for turn in json.loads(line)["turns"]]
        for part in sorted(run.glob("episodes/*"))
        for stored in stored_steps(part).values()
        for line in lines_of(stored)
    ]


def metrics(run: Path) -> list[dict[str, float]]:
    """Return the rows of a run without times and bytes."""
    return [{k: v for k, v in row.items() if not k.startswith("memory/")} for row in rows(run)]


def assert_close(one: Path, other: Path) -> None:
    assert sampled(one) == sampled(other) != []
    for row, same in zip(metrics(one), metrics(other), strict=True):
        assert row == pytest.approx(same, rel=1e-2, abs=1e-3)


AHEAD: dict[str, Any] = {
    **SMALL,
    "algorithm": PPO,
    "training": {"steps": 4, "tasks_per_step": 2, "max_staleness": 1},
}


@pytest.mark.parametrize("stops", [[], [1, 2]])
def test_sampling_ahead_of_the_update_is_the_same_on_a_gpu(stops: Sequence[int], tmp_path: Path) -> None:
    trained(tmp_path / "cpu", "cpu", AHEAD)
    plain = trained(tmp_path / "plain", "cuda", AHEAD)
    assert_close(tmp_path / "plain", tmp_path / "cpu")
    if stops:
        assert same_bits(trained(tmp_path / "gpu", "cuda", AHEAD, stops), plain)


def test_a_process_that_samples_without_interruption_uses_the_new_weights_on_a_gpu(tmp_path: Path) -> None:
    chosen = asynchronous()
    with Trainer(
        **{**chosen, "model": {**chosen["model"], "device": "cuda"}}, run_dir=tmp_path / "run"
    ) as trainer:
        steps = list(trainer.steps())
        check_tasks(trainer, steps)
    check_ages(steps)


def test_environment_workers_play_the_same(tmp_path: Path) -> None:
    settings = {**AHEAD, "episode": {"environment_workers": 2}}
    trained(tmp_path / "gpu", "cuda", settings)
    trained(tmp_path / "cpu", "cpu", AHEAD)
    assert_close(tmp_path / "gpu", tmp_path / "cpu")


@pytest.mark.parametrize("launch", ["torchrun", "ray"])
def test_a_launched_run_on_gpus_is_that_on_a_cpu(launch: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    tree = yaml.safe_load(RECIPE) | {"optimizer": FAST, "training": {"steps": 2, "tasks_per_step": 4}}
    if launch == "ray":  # it finds no GPU here, and asks for none
        share = {"cpus": 0.1}
        tree["ray"] = {"trainer": share, "rollout": share, "rollout_workers": 2}
    recipe.write_text(yaml.safe_dump(tree), "utf-8")
    here, there = tmp_path / "cpu", tmp_path / "gpu"
    assert main(["train", str(recipe), "--run-dir", str(here), "--no-rich", "model.device=cpu"]) == 0
    words = ["train", str(recipe), "--run-dir", str(there), "--no-rich", "model.device=cuda"]
    command = [sys.executable, "-m", "kapelle", *words, "--launch", launch]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert_close(there, here)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_gpus_continues(
    engine: str, before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAPELLE_CACHE", str(tmp_path / "cache"))
    gpu, cpu = (Way(engine, steps=3, device=device) for device in ("cuda", "cpu"))
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert train(cpu, whole, 1) == [0], said(whole)
    assert train(gpu, run, before, Kill(Death("in an update", 8))) == [-9] * before
    assert len(read_metrics(run)) < 3
    assert train(gpu, run, after) == [0] * after, said(run)
    assert_close(run, whole)
