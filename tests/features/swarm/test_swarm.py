"""PARL's rewards: which turns receive them, how much, and until when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.episodes import episode, group, turn
from tests.support.tiny import same_bits

from kapelle import Trainer
from kapelle.errors import ConfigError
from kapelle.features.swarm.feature import SwarmRewards, critical_tokens
from kapelle.features.swarm.settings import SwarmConfig

SIZE = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 64, "context": 256}


def given(**over: Any) -> dict[str, Any]:
    return {
        "model": {"path": "embedded", "embedded": SIZE},
        "environment": {"name": "sum_lists"},
        "workflow": {"name": "swarm"},
        "team": {
            "agents": [
                {"name": "planner", "sampling": {"choices": ["- 1+1\n- 2+2", "- 1+1"], "max_tokens": 16}},
                {"name": "worker", "sampling": {"max_tokens": 4}},
            ]
        },
        "algorithm": {"name": "grpo", "group_size": 2, "scale": "none", "team_reward": "individual"},
        "training": {"steps": 4, "tasks_per_step": 2},
        "evaluation": {"before_and_after": False},
        "optimizer": {"lr": 1e-2},
        **over,
    }


def test_a_plan_is_rewarded_for_parallel_calls_that_finish_until_the_weights_are_0() -> None:
    swarm: dict[str, Any] = {"parallel": 0.4, "finish": 0.2, "calls": 3, "until": 0.5}
    cut: dict[str, Any] = {"finish_reason": "length"}
    parallel = episode(
        turn("planner", 0),
        turn("worker", 1, caller=0),
        turn("worker", 2, caller=0, **cut),
        turn("planner", 3, reward=1.0),
    )
    serial = episode(
        turn("planner", 0), turn("worker", 1, caller=0), turn("planner", 2), turn("worker", 3, caller=2)
    )
    alone = episode(turn("planner", 0))
    run: Any = SimpleNamespace(config=SimpleNamespace(training=SimpleNamespace(steps=4)))
    rewards, groups, found = SwarmRewards(SwarmConfig(**swarm), run), [group(parallel, serial, alone)], []
    step: Any = SimpleNamespace(groups=groups, metrics={})
    for step.number in (1, 2, 3, 4):
        rewards.before_update(step)
        [changed] = rewards.rewarded(groups, None)
        found.append([[each.reward for each in one.turns] for one in changed.episodes])
    assert step.metrics == {
        "swarm/weight": 0.0,
        "swarm/calls": 4 / 3,
        "swarm/finished": 0.75,
        "swarm/critical_tokens": (6 + 8 + 2) / 3,
        "swarm/tokens": (8 + 8 + 2) / 3,
    }
    # Two of at most three calls: 0.4·(2 − 1)/(3 − 1) = 0.2; one of two finished: 0.2·0.5 = 0.1. One call: 0 + 0.2.
    assert found[0] == [[pytest.approx(0.3), 0.0, 0.0, 1.0], [0.2, 0.0, 0.2, 0.0], [0.0]]
    assert found[1] == [[pytest.approx(0.15), 0.0, 0.0, 1.0], [0.1, 0.0, 0.1, 0.0], [0.0]]
    assert found[2] == found[3] == [[0.0, 0.0, 0.0, 1.0], [0.0] * 4, [0.0]]


def test_calls_by_one_turn_are_simultaneous_on_the_longest_path() -> None:
    stages = episode(
        turn("planner", 0, tokens=5),
        turn("worker", 1, tokens=3, caller=0),
        turn("worker", 2, tokens=7, caller=0),
        turn("helper", 3, tokens=2, caller=1),
        turn("helper", 4, tokens=6, caller=1),
        turn("planner", 5, tokens=4),
        turn("worker", 6, tokens=1, caller=5),
    )
    assert critical_tokens(stages) == 5 + (3 + 6) + 4 + 1


def test_individual_rewards_move_the_planner_and_not_the_worker() -> None:
    weights = {}
    for name, swarm in {"with": {"parallel": 1.0, "calls": 2}, "without": None}.items():
        with Trainer(**given(swarm=swarm)) as trainer:
            next(trainer.steps())
            weights[name] = {agent: dict(trainer.engine.weights(agent)) for agent in ("planner", "worker")}
    assert not same_bits(weights["with"]["planner"], weights["without"]["planner"])
    assert same_bits(weights["with"]["worker"], weights["without"]["worker"])


def test_an_algorithm_without_sampling_has_no_calls_to_reward() -> None:
    with pytest.raises(ConfigError, match="does not sample"):
        Trainer(**given(swarm={}, algorithm={"name": "sft"}))
