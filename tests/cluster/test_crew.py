"""Rollout workers collect the same episodes as one process, also after deaths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.features.ahead.test_asynchronous import check_ages, check_tasks
from tests.features.ahead.test_queue import PPO, SMALL
from tests.support.cluster import Cluster, Learned
from tests.support.cluster import learned as run

from kapelle import Trainer
from kapelle.cluster import actors
from kapelle.cluster.ray_workers import RayPlayer
from kapelle.errors import ConfigError, EngineError
from kapelle.runtime.interrupts import StopRequested

SETTINGS: dict[str, Any] = {
    **SMALL,
    "algorithm": PPO,
    "training": {"steps": 2, "tasks_per_step": 3},
    "evaluation": {"problems": 3, "before_and_after": False},
}


def learned() -> Learned:
    return run(SETTINGS, evaluates=True)


def workers(count: int) -> dict[str, int]:
    return {"rollout_workers": count}


def test_a_worker_collects_bitwise_the_same_episodes(cluster: Callable[..., Cluster]) -> None:
    alone = learned()
    made = cluster(workers(1))
    there = learned()
    assert ("play" in {method for _, method in made.asked}, made.left, made.ended) == (True, True, [0])
    assert there.is_same(alone)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["begin", "play"])
def test_a_worker_that_dies_is_replaced_and_nothing_changes(
    method: str, cluster: Callable[..., Cluster]
) -> None:
    cluster(workers(2))
    undisturbed = learned()
    seen: list[str] = []

    def dies(number: int, request: str) -> bool:
        seen.append(request)
        return request == method and number in {0, 1} and seen.count(method) > 2 * (method == "play")

    made = cluster(workers(2), dies)
    disturbed = learned()
    assert made.started == 4
    assert disturbed.is_same(undisturbed)


@pytest.mark.slow
def test_workers_that_join_and_leave_change_nothing(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster(workers(3))
    all_there = learned()
    request: list[int] = []

    def dies(number: int, method: str) -> bool:  # actor 1 leaves when it is asked to play again
        request.extend([number] if method == "play" else [])
        return number == 1 and method == "play" and request.count(1) == 2

    def first(calls: list[Any], _: float) -> Any:  # actor 1 joins after three shares, the others never
        return next((c for c in calls if c.number == 0 or (c.number == 1 and len(request) >= 3)), None)

    made = cluster({**workers(3), "least_rollout_workers": 1}, dies)
    monkeypatch.setattr(actors, "first_answered", first)
    disturbed = learned()
    assert set(request) == {0, 1}
    assert request.count(1) == 2
    assert made.started == 4, "another one is waited for in the place of the one that left"
    assert "2 of 3" in caplog.text
    assert (
        "a worker that had joined has left (it was killed); other workers take over its groups" in caplog.text
    )
    assert disturbed.is_same(all_there)


ASYNCHRONOUS: dict[str, Any] = {
    **SETTINGS,
    "team": {"agents": 2, "lora": {"rank": 2}, "sampling": {"max_tokens": 60, "stop": [*"aeiou"]}},
    "algorithm": {"name": "grpo", "group_size": 2, "loss": {"importance_cap": 2.0}},
    "training": {"steps": 4, "tasks_per_step": 4, "max_staleness": 2, "asynchronous": True},
    "evaluation": {"problems": 2, "every": 2, "problems_while_training": 2, "before_and_after": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
def test_workers_roll_out_without_interruption(lost: bool, cluster: Callable[..., Cluster]) -> None:
    """Every group is trained on once, also if a worker dies between two requests, and evaluations use the same workers."""
    seen: list[int] = []

    def dies(number: int, method: str) -> bool:
        seen.extend([number] if method == "play" else [])
        return lost and number == 1 and seen.count(1) == 4

    made = cluster(workers(2), dies)
    with Trainer(**ASYNCHRONOUS) as trainer:
        steps = list(trainer.steps())
        check_tasks(trainer, steps)
    check_ages(steps)
    assert made.started == 2 + lost, "no sampling process beside the workers"


def test_an_interrupted_step_takes_its_groups_later(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster(workers(1))
    with Trainer(**ASYNCHRONOUS, run_dir=tmp_path / "run") as trainer:
        steps = trainer.steps()
        done = [next(steps)]
        trainer.save()

        def stop() -> None:
            raise StopRequested

        with monkeypatch.context() as stopping:
            stopping.setattr(actors, "stop_if_requested", stop)
            with pytest.raises(StopRequested):
                next(steps)
        assert trainer.done == 1
        check_tasks(trainer, [*done, *trainer.steps()])


def test_an_error_of_a_worker_is_raised_in_the_caller(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(workers(1))

    def fail(*_: object) -> bytes:
        raise EngineError("no memory for the KV cache")

    monkeypatch.setattr(RayPlayer, "_play", fail)
    with pytest.raises(EngineError, match="no memory for the KV cache"):
        learned()


def test_other_weights_on_disk_are_an_error(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(workers(1))
    monkeypatch.setattr(RayPlayer, "_begin", lambda *_: json.dumps({"hashes": {"base": "another"}}).encode())
    with pytest.raises(ConfigError, match="loaded different weights from 'embedded'"):
        learned()
