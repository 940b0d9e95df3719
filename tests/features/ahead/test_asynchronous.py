"""Sampling without interruption in another process: which groups a step trains on, and what a stop or a lost process costs."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.features.ahead.test_queue import SMALL
from tests.runtime.test_guard import gone, until
from tests.support.step_times import check_times
from tests.support.tiny import frozen_copy
from torch import Tensor

from kapelle import Trainer
from kapelle.engines.train.protocol import TrainEngine
from kapelle.errors import EngineError, ParityError
from kapelle.features.ahead import start
from kapelle.features.ahead.asynchronous import AsynchronousRollouts, steps_ahead
from kapelle.features.ahead.process import SERVER, SamplingProcess
from kapelle.rollout.episodes import complete_groups
from kapelle.rollout.partial import Exchange, GroupKey, PartialEpisode, Wanted
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.foreign_code import received_error
from kapelle.runtime.process_tree import SharedStatus, is_stopped, start_server
from kapelle.runtime.randomness import capture_random, random_as_lists, random_from_lists, restore_random
from kapelle.settings.schema import RunConfig
from kapelle.team import Team
from kapelle.training.selection import training_tasks
from kapelle.training.step_report import Step

TRAINING = {"steps": 6, "tasks_per_step": 4, "max_staleness": 2, "asynchronous": True}


def settings(**training: Any) -> dict[str, Any]:
    """Completions of all lengths up to 120 tokens, which end at the first vowel."""
    return {
        **SMALL,
        "team": {"agents": 2, "lora": {"rank": 2}, "sampling": {"max_tokens": 120, "stop": [*"aeiou"]}},
        "algorithm": {"name": "grpo", "group_size": 2, "loss": {"importance_cap": 2.0}},
        "training": {**TRAINING, **training},
    }


def rollouts_of(trainer: Trainer) -> AsynchronousRollouts:
    rollouts = trainer.loop.rollouts
    assert isinstance(rollouts, AsynchronousRollouts)
    return rollouts


def sampler_of(trainer: Trainer) -> SamplingProcess:
    sampler = rollouts_of(trainer).players[-1]
    assert isinstance(sampler, SamplingProcess)
    return sampler


def check_ages(steps: Sequence[Step], most: int = 2) -> int:
    """Assert that no token is too old, and return the number of turns that several versions sampled.

    Every step is one optimiser step: the weights that learn in step n have version n - 1.
    """
    turns = [
        (step, turn) for step in steps for group in step.groups for e in group.episodes for turn in e.turns
    ]
    for step, turn in turns:
        assert step.number - 1 - most <= min(version for version, _ in turn.runs)
        assert max(version for version, _ in turn.runs) <= step.number - 1
        assert sum(count for _, count in turn.runs) == len(turn.completion_ids) == len(turn.logprobs)
    for step in steps:
        assert step.metrics.get("parity/max", 0.0) <= 1e-4
        assert 0.0 <= step.metrics["staleness"] <= most
        check_times(step.metrics)
    return sum(bool(turn.versions) for _, turn in turns)


def check_tasks(trainer: Trainer, steps: Sequence[Step]) -> None:
    """Assert that each task of the whole run was trained on once."""
    config = trainer.config
    expected = Counter(
        task.id
        for number in range(1, config.training.steps + 1)
        for task in training_tasks(config.environment, config, number)
    )
    assert Counter(group.task.id for step in steps for group in step.groups) == expected


def test_a_run_trains_once_on_every_group(tmp_path: Path) -> None:
    with Trainer(**settings(), run_dir=tmp_path / "run") as trainer:
        steps = list(trainer.steps())
        check_tasks(trainer, steps)
    check_ages(steps)  # how many turns continue with new weights depends on the machine
    assert "parity/max" in steps[0].metrics


@pytest.mark.slow
def test_a_resumed_run_continues_the_sampled_tokens(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Trainer(**settings(), run_dir=run) as trainer:
        steps = [step for _, step in zip(range(2), trainer.steps(), strict=False)]
        trainer.save()
        rollouts = rollouts_of(trainer)
        held = {**rollouts._wanted, **rollouts._finished}
        assert len(held) == 4, "the groups of step 3"
    with Trainer(**settings(), run_dir=run, resume=True) as trainer:
        state = rollouts_of(trainer)
        begun = {
            (group.task.id, each.seed): each.sampled
            for group in state._wanted.values()
            for each in group.episodes
            if isinstance(each, PartialEpisode)
        }
        assert held.keys() == {**state._wanted, **state._finished}.keys()
        rest = list(trainer.steps())
        check_tasks(trainer, [*steps, *rest])
    check_ages([*steps, *rest])
    # How many tokens were sampled at the save depends on the machine; `tests/rollout/test_further.py` continues tokens in any case.
    for episode in (e for step in rest for group in step.groups for e in group.episodes):
        for before in begun.get((episode.task.id, episode.seed), ()):
            [turn] = [
                t for t in episode.turns if t.prompt_ids == before.prompt_ids and t.agent == before.agent
            ]
            count = len(before.completion_ids)
            assert turn.completion_ids[:count] == before.completion_ids
            assert turn.logprobs[:count] == before.logprobs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, r"was killed by signal 9 \(SIGKILL\)"),
        (signal.SIGSTOP, r"stopped responding: it has been stopped \(by SIGSTOP or Ctrl-Z\) for 2 s"),
    ],
)
def test_a_lost_process_is_replaced_and_no_group_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, how: str
) -> None:
    monkeypatch.setenv("KAPELLE_STALLED_AFTER", "2")
    with Trainer(**settings(), run_dir=tmp_path / "run") as trainer:
        steps = []
        for step in trainer.steps():
            steps.append(step)
            if step.number == 2:
                process = sampler_of(trainer).process
                assert process is not None
                os.kill(process.pid, number)
        check_tasks(trainer, steps)
    check_ages(steps)
    assert re.search(how, caplog.text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "counterfactual", "group_size": 4},
        {"name": "c3", "group_size": 4},
        {"name": "grpo", "group_size": 2, "redraw": 2},
    ],
)
def test_algorithms_that_continue_or_replace_episodes(algorithm: dict[str, Any], tmp_path: Path) -> None:
    chosen = {**settings(steps=3), "algorithm": algorithm}
    with Trainer(**chosen, run_dir=tmp_path / "run") as trainer:
        steps = [*trainer.steps()]
        assert all(len(step.groups) == 4 for step in steps)
    check_ages(steps)


def test_half_of_the_staleness_is_for_long_episodes() -> None:
    assert [steps_ahead(most) for most in (1, 2, 3, 4, 8)] == [1, 1, 2, 2, 4]


class LateSampler:
    """Rolls out groups in this process. Groups in `late` end only at the third request of a step."""

    late: frozenset[GroupKey] = frozenset({GroupKey(1, 0)})

    def __init__(
        self, config: RunConfig, team: Team, _bases: object, _hashes: object, engine: TrainEngine
    ) -> None:
        self.trainer: Trainer | None = None
        self.requests = Counter[int]()
        self.weights = {name: frozen_copy(engine.weights(name)) for name in team.trained}

    def load(self, policy: str, weights: Mapping[str, Tensor], version: int) -> None:
        self.weights[policy] = frozen_copy(weights)

    def close(self) -> None: ...

    def exchange(self, wanted: Wanted, *, unfinished: bool = False, seconds: float = 0.0) -> Exchange:
        assert self.trainer is not None
        step = self.trainer.done + 1
        self.requests[step] += bool(seconds)
        self.wanted = set(wanted)
        ready = [key for key in wanted if seconds and (key not in self.late or self.requests[step] >= 3)]
        setup = replace(self.trainer.setup, data=self.trainer.algorithm.data)
        groups = run_async(lambda: complete_groups(setup, [wanted[key] for key in ready], 4))
        found = {k: replace(wanted[k], episodes=g.episodes) for k, g in zip(ready, groups, strict=True)}
        return Exchange(found, {})


def test_a_step_waits_only_for_a_group_that_would_become_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "SamplingProcess", LateSampler)
    with Trainer(**settings()) as trainer:
        sampler = rollouts_of(trainer)._sampler
        assert isinstance(sampler, LateSampler)
        sampler.trainer = trainer
        steps = list(trainer.steps())
        check_tasks(trainer, steps)
        [late, *others] = training_tasks(trainer.config.environment, trainer.config, 1)
    assert sampler.requests == {1: 1, 2: 1, 3: 3, 4: 1, 5: 1, 6: 1}
    taken = {group.task.id: step.number for step in steps for group in step.groups}
    assert taken[late.id] == 3
    assert {taken[task.id] for task in others} == {1}, "the oldest groups come first"


def test_several_groups_that_become_too_old_are_taken_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step 1 starts three groups. With one group per step, no step may leave both of the late ones for its last moment."""
    monkeypatch.setattr(start, "SamplingProcess", LateSampler)
    monkeypatch.setattr(LateSampler, "late", frozenset({GroupKey(2, 0), GroupKey(3, 0)}))
    with Trainer(**settings(tasks_per_step=1, max_staleness=3)) as trainer:
        sampler = rollouts_of(trainer)._sampler
        assert isinstance(sampler, LateSampler)
        sampler.trainer = trainer
        steps = list(trainer.steps())
        check_tasks(trainer, steps)
        late = [training_tasks(trainer.config.environment, trainer.config, number)[0] for number in (2, 3)]
    taken = {group.task.id: step.number for step in steps for group in step.groups}
    assert sorted(taken[task.id] for task in late) == [3, 4]


def test_each_redraw_has_other_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "SamplingProcess", LateSampler)
    with Trainer(**settings()) as trainer:
        rollouts = rollouts_of(trainer)
        [task, *_] = training_tasks(trainer.config.environment, trainer.config, 1)
        rollouts.tasks.draws = SimpleNamespace(of=lambda step, attempt: [task])
        for attempt in range(3):
            rollouts._start(1, 1, 0, attempt)
        seeds = [each.seed for one in rollouts._wanted.values() for each in one.episodes]
    assert len(set(seeds)) == len(seeds) == 3 * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_another_number_of_ranks_divides_the_groups_evenly(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "SamplingProcess", LateSampler)
    with Trainer(**settings()) as trainer:
        rollouts = rollouts_of(trainer)
        sampler = rollouts._sampler
        assert isinstance(sampler, LateSampler)
        sampler.trainer = trainer
        trainer.train(2)
        state = rollouts.state()
        every = {**rollouts._wanted, **rollouts._finished}.keys()
        assert len(every) == 4, "of step 3"
        found: list[GroupKey] = []
        for rank in range(size):
            monkeypatch.setattr(rollouts, "_ranks", SimpleNamespace(rank=rank, size=size))
            rollouts.load_state(state)
            assert sampler.wanted == set(), "the sampler forgets its groups"
            own = [*rollouts._wanted, *rollouts._finished]
            assert len(own) == len(range(rank, 4, size))
            found += own
    assert sorted(found) == sorted(every)


def test_the_other_process_leaves_when_nobody_is_left() -> None:
    pulse = SharedStatus()
    process, ours = start_server(SERVER, pulse)
    ours.close()
    assert process.wait(60) == 0
    pulse.close()


TRAINER = """
import sys
from tests.features.ahead.test_asynchronous import *
with Trainer(**settings(steps=10**6)) as trainer:
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
