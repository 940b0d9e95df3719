"""Sampling in a second process: the same run, bitwise, and no end of that process that is not met."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.features.ahead.test_queue import PPO, SMALL
from tests.runtime.test_guard import gone, until
from tests.support.episode_lines import lines_in
from tests.support.tiny import frozen_copy, same_bits

from kapelle import Trainer
from kapelle.errors import EngineError, ParityError
from kapelle.features.ahead import process as sampling_process
from kapelle.features.ahead.process import SERVER, SamplingProcess
from kapelle.runtime.foreign_code import received_error
from kapelle.runtime.process_tree import SharedStatus, is_stopped, start_server
from kapelle.runtime.randomness import capture_random, random_as_lists, random_from_lists, restore_random


def settings(overlap: bool, max_staleness: int = 1) -> dict[str, Any]:
    training = {"steps": 4, "tasks_per_step": 2, "max_staleness": max_staleness, "overlap": overlap}
    return {**SMALL, "algorithm": PPO, "training": training}


def end_of(trainer: Trainer) -> dict[str, Any]:
    return {name: frozen_copy(trainer.engine.weights(name)) for name in trainer.team.trained}


def rows(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run without a second process: its folder, and the weights at its end."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    with Trainer(**settings(overlap=False), run_dir=folder) as trainer:
        trainer.train()
        return folder, end_of(trainer)


def assert_same(run: Path, trainer: Trainer, alone: tuple[Path, dict[str, Any]]) -> None:
    folder, weights = alone
    assert all(same_bits(end_of(trainer)[name], weights[name]) for name in weights)
    assert rows(run) == rows(folder)
    assert lines_in(run) == lines_in(folder) != {}


def sampler_of(trainer: Trainer) -> SamplingProcess:
    sampler = trainer.loop.rollouts.players[-1]
    assert isinstance(sampler, SamplingProcess)
    return sampler


class Moment:
    """Sends the process a signal when it has been asked to play a step, once or more often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int, number: int, times: int = 1) -> None:
        self.step, self.number, self.left = step, number, times
        ask = SamplingProcess.send

        def asking(process: SamplingProcess, question: tuple[Any, ...]) -> None:
            ask(process, question)
            if question[0] == self.step and self.left:
                self.left -= 1
                assert process.process is not None
                os.kill(process.process.pid, self.number)

        monkeypatch.setattr(SamplingProcess, "send", asking)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, "was killed by signal 9 (SIGKILL)"),
        (signal.SIGSTOP, "stopped responding: it has been stopped (by SIGSTOP or Ctrl-Z) for 2 s"),
    ],
)
def test_a_run_is_the_same_where_the_process_is_lost_and_the_run_stopped(
    alone: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    how: str,
) -> None:
    monkeypatch.setenv("KAPELLE_STALLED_AFTER", "2")
    Moment(monkeypatch, 1, number)
    Moment(monkeypatch, 4, signal.SIGSTOP)  # so that it is still playing when the run is stopped
    run = tmp_path / "run"
    with Trainer(**settings(overlap=True), run_dir=run) as trainer:
        steps = trainer.steps()
        next(steps)
        next(steps)
        with monkeypatch.context() as patched:
            patched.setattr(sampling_process, "together", _pressed)
            with pytest.raises(KeyboardInterrupt):
                next(steps)  # while it waits for the play that step 3 began: the process is given up
        assert trainer.done == 2
        assert how in caplog.text
        assert "Another process plays step 1." in caplog.text
        trainer.train()  # from the newest checkpoint, with another process
        assert_same(run, trainer, alone)


def _pressed(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["counterfactual", "ccpo", "c3"])
def test_episodes_that_are_played_on_or_branch_are_the_same_too(name: str, tmp_path: Path) -> None:
    ends = []
    for overlap in (False, True):
        run = tmp_path / str(overlap)
        chosen = {**settings(overlap), "algorithm": {"name": name, "group_size": 4}}
        with Trainer(**chosen, run_dir=run) as trainer:
            trainer.train(2)
            ends.append((end_of(trainer), rows(run), lines_in(run)))
    assert ends[0][1:] == ends[1][1:]
    assert all(same_bits(ends[0][0][key], ends[1][0][key]) for key in ends[0][0])


def test_the_other_process_leaves_when_nobody_is_left() -> None:
    pulse = SharedStatus()
    process, ours = start_server(SERVER, pulse)
    ours.close()
    assert process.wait(60) == 0
    pulse.close()


TRAINER = """
import sys
from tests.features.ahead.test_overlap import *
with Trainer(**settings(overlap=True)) as trainer:
    trainer.train(1)
    print(sampler_of(trainer).process.pid, flush=True)
    trainer.train(10**6)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel continues it there")
def test_the_other_process_ends_with_a_trainer_that_is_killed_though_it_is_stopped() -> None:
    words = [sys.executable, "-c", TRAINER]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environ) as trainer:
        assert trainer.stdout is not None
        sampler = int(trainer.stdout.readline())
        os.kill(sampler, signal.SIGSTOP)
        until(lambda: is_stopped(sampler))
        trainer.kill()
    until(lambda: gone(sampler))


def test_what_runs_there_comes_back_as_it_was() -> None:
    before = capture_random()
    try:
        random.seed(3)
        np.random.seed(4)
        torch.manual_seed(5)
        state = capture_random()
        expected = random.random(), float(np.random.rand()), float(torch.rand(1))
        restore_random(random_from_lists(json.loads(json.dumps(random_as_lists(state)))))
        assert (random.random(), float(np.random.rand()), float(torch.rand(1))) == expected
    finally:
        restore_random(before)
    error = received_error(
        {"kind": "ParityError", "message": "other weights", "trace": ""}, "The sampling process"
    )
    assert isinstance(error, ParityError)
    unknown = received_error(
        {"kind": "KeyError", "message": "'x'", "trace": "in line 7"}, "The sampling process"
    )
    assert isinstance(unknown, EngineError)
    assert "in line 7" in str(unknown)
