"""Rollouts that run ahead: whose words a step learns from, and that a resumed run has them still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.episodes import episode, group, turn
from tests.support.tiny import frozen_copy, same_bits

from kapelle import Trainer
from kapelle.errors import ParityError
from kapelle.features.ahead.queue import Left, RolloutQueue
from kapelle.training.rollouts import StepShare

SMALL: dict[str, Any] = {
    "model": {"embedded": {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32}},
    "environment": {"name": "tests.support.plugins:Digest"},
    "workflow": {"name": "parallel"},
    "team": {"agents": 2, "sampling": {"max_tokens": 3}},
    "training": {"steps": 5, "tasks_per_step": 2, "max_staleness": 2},
    "optimizer": {"lr": 1e-2},
    "evaluation": {"before_and_after": False},
}
PPO = {"name": "ippo", "gae": {"vtrace": True}, "loss": {"importance_cap": 2.0}}


class Player:
    """Plays steps with the version that acts now, and notes which."""

    def __init__(self) -> None:
        self.version = 0
        self.played: list[int] = []

    def __call__(self, number: int, left: Left = ()) -> StepShare:
        self.played.append(number)
        return StepShare({0: group(episode(turn("a", 0, version=self.version)))})


def test_a_step_learns_from_weights_of_so_many_steps_before() -> None:
    ahead, setup, ages = RolloutQueue(2), Player(), []
    for number in range(1, 7):
        groups = ahead.take(number, {"a": setup.version}, setup)
        ages.append(ahead.staleness(groups))
        setup.version += 1
    assert setup.played == list(range(1, 9))
    assert ages == [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]


def test_without_staleness_every_step_is_fresh() -> None:
    ahead, setup = RolloutQueue(0), Player()
    for number in range(1, 4):
        (one,) = ahead.take(number, {"a": setup.version}, setup)
        assert one.episodes[0].turns[0].version == setup.version
        setup.version += 1
    assert setup.played == [1, 2, 3]


@pytest.mark.parametrize("most", [0, 2])
def test_other_weights_are_caught_when_they_speak(most: int) -> None:
    ahead, setup = RolloutQueue(most), Player()
    ahead.take(1, {"a": 0}, setup)
    with pytest.raises(ParityError, match="version 0 of policy 'a', but version 1 was published"):
        ahead.take(2, {"a": 1}, setup)  # the player continues with version 0


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [PPO, {"name": "grpo", "group_size": 2, "loss": {"importance_cap": 2.0}}]
)
def test_a_resumed_run_learns_from_the_same_old_words(algorithm: dict[str, Any], tmp_path: Path) -> None:
    with Trainer(**SMALL, algorithm=algorithm, run_dir=tmp_path / "whole") as whole:
        rows = [step.metrics for step in whole.steps()]
        expected = {name: frozen_copy(whole.engine.weights(name)) for name in whole.team.trained}
    assert [row["staleness"] for row in rows] == [0.0, 1.0, 2.0, 2.0, 2.0]
    # Old words weigh differently from new ones: the corrections have something to correct.
    assert rows[0]["importance/agent_0"] == pytest.approx(1.0, abs=1e-4)
    assert abs(rows[4]["importance/agent_0"] - 1.0) > 1e-4
    with Trainer(**SMALL, algorithm=algorithm, run_dir=tmp_path / "parts") as first:
        first.train(3)
    with Trainer(**SMALL, algorithm=algorithm, run_dir=tmp_path / "parts", resume=True) as second:
        second.train()
        for name, weights in expected.items():
            assert same_bits(frozen_copy(second.engine.weights(name)), weights)
