"""A function of the user's: its numbers are metrics, and its faults cost no step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from tests.support.tiny import tiny_model

import kapelle
from kapelle.algorithms import GRPO
from kapelle.environments import Arithmetic
from kapelle.training.trainer import CustomMetrics
from kapelle.workflows import Solo


def words(episodes: Sequence[kapelle.Episode]) -> Mapping[str, float]:
    return {"episodes": len(episodes), "longest": max(len(turn.text) for e in episodes for turn in e.turns)}


def test_its_numbers_stand_among_a_steps_metrics() -> None:
    trainer = kapelle.Trainer(
        model=tiny_model(),
        team={"agents": 1, "sampling": {"max_tokens": 2}, "lora": {"rank": 2}},
        environment=Arithmetic(digits=1),
        workflow=Solo(),
        algorithm=GRPO(group_size=2),
        training={"tasks_per_step": 3},
        metrics=words,
    )
    with trainer:
        [step] = trainer.steps(1)
    assert step.metrics["custom/episodes"] == 6.0
    assert step.metrics["custom/longest"] <= 2.0


def test_what_goes_wrong_is_said_once_and_costs_no_step() -> None:
    said: list[str] = []
    broken = CustomMetrics(lambda episodes: {"x": 1 / len(episodes)}, said.append)
    assert [broken.of([]), broken.of([])] == [{}, {}]
    endless = CustomMetrics(lambda episodes: {"x": float("inf"), "y": 2}, said.append)
    assert [endless.of([]), endless.of([])] == [{"custom/y": 2.0}] * 2
    huge = CustomMetrics(lambda episodes: {"z": 10**30, "x": 10**400}, said.append)
    assert huge.of([]) == {"custom/z": 1e30}
    assert "for 'x', not a finite number" in said.pop()
    at = "(test_custom_metrics.py, line 39)"
    assert said == [
        f"the function of `metrics=` raised ZeroDivisionError: division by zero {at}; these numbers are not recorded",
        "the function of `metrics=` returned 'inf' for 'x', not a finite number; these numbers are not recorded",
    ]
    with pytest.raises(kapelle.ConfigError, match="`metrics` is dict"):
        CustomMetrics({}, said.append)  # type: ignore[arg-type]
