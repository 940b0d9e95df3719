"""The warm-up is a stage like any other: what it learns, that it can be broken off, and where it rejects."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.cli.conftest import TINY
from tests.support.copies import Copies
from tests.support.episodes import episode, group, turn
from tests.support.tiny import frozen_copy, same_bits
from torch import Tensor

import kapelle.algorithms.sft
from kapelle.algorithm import Loss, Outputs, Targets
from kapelle.algorithms.sft import negative_log_likelihood
from kapelle.environment import Scripted
from kapelle.errors import EpisodeError, TrainingHalted
from kapelle.features.warmup.key import stage_of
from kapelle.features.warmup.stage import DrawnTurns, train_stage, warmed_up
from kapelle.runtime.interrupts import StopRequested, catch_interrupts
from kapelle.settings.schema import RunConfig
from kapelle.setup.recipe import load_recipe
from kapelle.training.trainer import Trainer
from kapelle.types import Group, Message, Task


class Faithful(Copies, Scripted):
    """Words that the script copies without a fault."""

    name: Literal["tests.features.warmup.test_warmup:Faithful"] = "tests.features.warmup.test_warmup:Faithful"  # type: ignore[assignment]

    def script(self, agent: str, task: Task, new_messages: Sequence[Message], seed: int) -> str:
        return task.question


class Dumb(Copies, Scripted):
    """Words of which the script has nothing to say."""

    name: Literal["tests.features.warmup.test_warmup:Dumb"] = "tests.features.warmup.test_warmup:Dumb"  # type: ignore[assignment]

    def script(self, agent: str, task: Task, new_messages: Sequence[Message], seed: int) -> str:
        raise EpisodeError("nothing to say")


def config_of(*settings: str) -> RunConfig:
    return load_recipe("demo", (), (*TINY, *settings)).config


def weights_of(config: RunConfig) -> Mapping[str, Tensor]:
    return frozen_copy(train_stage(config, None).base_parameters())


def test_one_step_over_all_that_is_shown_is_the_step_of_sft_on_the_same_tasks() -> None:
    words = "environment={name: tests.features.warmup.test_warmup:Faithful}"
    tasks = config_of(words).environment.size("train")
    assert tasks == 28  # 36 words of two letters, of which every fifth is held out
    everything = f"warmup={{steps: 1, demonstrations: {tasks}, batch: {2 * tasks}, lr: 0.01}}"
    config = config_of(words, everything)
    warmed = weights_of(config)
    stage = stage_of(config)
    training = stage.training.model_copy(update={"tasks_per_step": tasks})
    with Trainer(stage.model_copy(update={"training": training})) as trainer:
        before = frozen_copy(trainer.models["base"].base_parameters())
        list(trainer.steps())
        for name, tensor in trainer.models["base"].base_parameters().items():
            torch.testing.assert_close(warmed[name], tensor.detach(), rtol=0, atol=1e-6)
    moved = [float((warmed[name] - before[name]).abs().max()) for name in before]
    assert max(moved) > 1e-3  # Adam's first step is the learning rate, whatever the gradient


def test_a_warm_up_that_is_broken_off_leaves_nothing_and_is_made_anew_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = config_of("warmup.steps=3")
    whole = weights_of(config)
    losses = 0

    def killed(outputs: Outputs, targets: Targets) -> Loss:
        nonlocal losses
        losses += 1
        if losses == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return negative_log_likelihood(outputs, targets)

    monkeypatch.setenv("KAPELLE_CACHE", str(tmp_path))
    new_messages: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(kapelle.algorithms.sft, "negative_log_likelihood", killed)
        with catch_interrupts() as stopped, pytest.raises(StopRequested):
            warmed_up(config, lambda step, _steps, _metrics: new_messages.append(step))
    assert (stopped.exit_code, new_messages[-1] < 3) == (143, True)
    assert list((tmp_path / "warmup").iterdir()) == []
    assert same_bits(weights_of(config), whole)


def test_demonstrations_that_all_fail_are_said_to() -> None:
    with pytest.raises(TrainingHalted, match="nothing to say"):
        train_stage(config_of("environment={name: tests.features.warmup.test_warmup:Dumb}"), None)


def drawing(shown: Sequence[Group], batch: int, seed: int = 0) -> Callable[[], list[Group]]:
    """Return what draws the turns of the next step."""
    nothing: Any = None
    source = DrawnTurns(shown, batch, seed, nothing)
    return lambda: source.collect(nothing)


class TestDrawnTurns:
    def test_a_step_draws_no_turn_twice_and_all_that_is_shown_where_it_asks_for_more(self) -> None:
        shown = [group(episode(turn("a", 0), turn("b", 1))), group(episode(turn("a", 0)))]
        for batch, drawn in ((2, 2), (9, 3)):
            step = drawing(shown, batch)()
            assert len(step) == len({id(each) for each in step}) == drawn

    def test_the_seed_decides_what_is_drawn(self) -> None:
        shown = [group(episode(*(turn("a", k, tokens=k + 1) for k in range(9))))]

        def drawn(seed: int) -> list[int]:
            step = drawing(shown, 2, seed)
            return [each.episodes[0].turns[0].index for _ in range(3) for each in step()]

        assert drawn(0) == drawn(0)
        assert drawn(0) != drawn(1)

    def test_what_a_workflow_leaves_out_of_training_is_shown_all_the_same(self) -> None:
        [step] = drawing([group(episode(turn("a", 0, trained=False)))], 1)()
        assert [each.trained for each in step.episodes[0].turns] == [True]
