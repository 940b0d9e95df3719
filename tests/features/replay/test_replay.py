"""Groups of earlier steps that a run trains on again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.features.curriculum.test_curriculum import NOISE, settings, weights
from tests.support.episodes import episode, group, turn
from tests.support.tiny import same_bits

from kapelle import Trainer
from kapelle.features.replay.feature import remembered, replayed
from kapelle.features.replay.settings import ReplayConfig
from kapelle.setup.recipe import resolve
from kapelle.types import Task


def of(task: str, *successes: float) -> Any:
    return group(*(episode(turn("a", 0), task=Task(task, task), success=each) for each in successes))


def test_groups_with_success_and_failure_are_kept_the_newest_of_each_task() -> None:
    some = ReplayConfig(groups=2, capacity=2, max_age=3)
    kept = remembered((), some, 1, [of("a", 1, 0), of("b", 0, 0), of("c", 1, 1), of("d", 0, 1)])
    assert [(when, each.task.id) for when, each in kept] == [(1, "a"), (1, "d")]
    kept = remembered(kept, some, 2, [of("a", 0, 1)])
    assert [(when, each.task.id) for when, each in kept] == [(1, "d"), (2, "a")]
    assert remembered(kept, some, 5, []) == (), "older than three steps at the next one, or dropped"
    again = replayed(kept, some, 5, 0, [of("d", 0, 0)])
    assert [each.task.id for _, each in again] == ["a"], "what is played now is not learned from twice"
    assert replayed(kept, some, 6, 0, []) == ()


def test_what_is_learned_from_again_is_said_and_changes_what_is_learned(tmp_path: Path) -> None:
    found = []
    for tasks in ({"replay": {"groups": 2}}, {}):
        with Trainer(resolve(settings(NOISE, **tasks))) as trainer:
            metrics = [step.metrics for step in trainer.steps(4)]
            found.append(weights(trainer))
        if tasks:
            assert metrics[0]["replay_groups"] == 0
            later = [(number, row) for number, row in enumerate(metrics, 1) if row["replay_groups"]]
            assert later
            assert all(
                1 <= row["replay_age"] < number and row["replay_log_ratio"] > 0 for number, row in later
            )
            assert all(row["parity/max"] < 1e-4 for row in metrics), (
                "the step's own tokens are still compared"
            )
    assert not same_bits(*found)
