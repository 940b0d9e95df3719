"""Episodes wait in line before they hold anything, so none waits for what another holds."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.stuck import Stuck
from tests.support.trees import at_grpo
from tests.support.trees import stage as branching

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.rollout import bounded_states
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.event_loop import run_async
from kapelle.types import Group, Task
from kapelle.workflows.parallel import Parallel

TASKS = [Task(f"t{k}", f"{k}?") for k in range(4)]
FAR = 60.0
"""Seconds that no test needs."""


def played(setup: RolloutSetup, samples: int = 2, most: int = 4096) -> list[Group]:
    return run_async(lambda: asyncio.wait_for(rollout(setup, TASKS, samples, 5, most), FAR))


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
