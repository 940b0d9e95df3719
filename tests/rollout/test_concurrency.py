"""Episodes wait in line before they hold anything, so none waits for what another holds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.support.stuck import Stuck
from tests.support.tiny import team_of
from tests.support.trees import at_grpo
from tests.support.trees import stage as branching

from kapelle.algorithm import Data
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.rollout import bounded_states
from kapelle.rollout.episodes import at_once, rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime import deadlines
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.event_loop import run_async
from kapelle.types import Group, Task
from kapelle.workflows.parallel import Parallel

TASKS = [Task(f"t{k}", f"{k}?") for k in range(4)]
FAR = 60.0
"""Seconds that no test needs."""


def played(setup: RolloutSetup, samples: int = 2, most: int = 4096) -> list[Group]:
    return run_async(lambda: asyncio.wait_for(rollout(setup, TASKS, samples, 5, most), FAR))


def errors(groups: Sequence[Group]) -> list[str]:
    return [episode.error for group in groups for episode in group.episodes if episode.error is not None]


def scripts() -> ScriptedEngine:
    return ScriptedEngine({"a": lambda request: "x", "b": lambda request: f"{request.seed}"})


class TestWorldsThatBlock:
    @pytest.mark.parametrize("workers", [1, 2, 5, 12])
    def test_branches_never_wait_for_what_their_episode_holds(
        self, workers: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def play(blocking: bool) -> RolloutSetup:
            return branching(
                at_grpo(2),
                scripts(),
                names=("a", "b"),
                environment=Stuck(blocking=blocking),
                workflow=Parallel(),
            )

        monkeypatch.setattr(bounded_states, "WORKERS", workers)
        assert played(play(True)) == played(play(False))

    def test_room_is_for_all_worlds_of_an_episode_and_for_one_episode_at_least(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bounded_states, "WORKERS", 12)
        blocks = branching(at_grpo(2), environment=Stuck(blocking=True))
        plain = replace(blocks, data=Data())
        assert at_once(replace(blocks, environment=Stuck()), 4096) == 4096
        assert at_once(plain, 4096) == 12
        assert at_once(plain, 3) == 3
        assert at_once(blocks, 4096) == 12 // 5
        six = branching(at_grpo(2), environment=Stuck(blocking=True), names=tuple("abcdef"))
        assert at_once(six, 4096) == 1


def test_a_task_that_is_left_behind_gives_its_place_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "GRACE", 0.3)
    world = Stuck(way="child", place="step", one_in=2)
    patience = Patience(environment=0.3, episode=5.0)
    setup = RolloutSetup(team_of("a", "b"), world, Parallel(), scripts(), patience=patience)
    groups = played(setup, most=2)
    assert len([episode for group in groups for episode in group.episodes]) == 8
    assert 0 < len(errors(groups)) < 8
    assert all("DeadlineExceeded" in error for error in errors(groups))
