"""Whatever a call of an environment does, its episode ends in time and the others do not notice."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from tests.support.stuck import Stuck, StuckState
from tests.support.tiny import team_of

from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import Environment
from kapelle.environments.grading.verdict import Grade
from kapelle.environments.questions import QuestionState
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime import deadlines
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.event_loop import run_async
from kapelle.types import Task
from kapelle.workflows.parallel import Parallel

WAYS = ["sleep", "lock", "spin", "swallow", "await", "deaf", "child"]
SYNC = {"start", "observe", "outcome"}


def stage(world: Environment, **patience: float) -> RolloutSetup:
    return RolloutSetup(
        team_of("a", "b"),
        world,
        Parallel(),
        ScriptedEngine({"a": lambda request: "x", "b": lambda request: f"{request.seed}"}),
        patience=Patience(**{"environment": 0.3, **patience}),
    )


TASKS = [Task(f"t{k}", f"{k}?") for k in range(3)]


def cases() -> list[tuple[str, str, bool]]:
    return [
        (way, place, blocking)
        for way, place, blocking in itertools.product(
            WAYS, ["start", "observe", "step", "outcome", "close"], [False, True]
        )
        if not (place in SYNC and way in {"await", "deaf", "child"})
    ]


@pytest.mark.sample(18)
@pytest.mark.slow
@pytest.mark.parametrize(("way", "place", "blocking"), cases())
def test_a_call_that_never_returns_costs_its_episode_alone(
    way: str, place: str, blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "GRACE", 0.3)
    calm = run_async(lambda: rollout(stage(Stuck()), TASKS, 2, 5))
    stuck = Stuck(way=way, place=place, one_in=3, blocking=blocking)
    # A thread that computes for ever slows down the others until it is given up.
    seconds = 2.0 if blocking else 0.3
    groups = run_async(lambda: rollout(stage(stuck, environment=seconds), TASKS, 2, 5))
    pairs = [
        pair for g, h in zip(groups, calm, strict=True) for pair in zip(g.episodes, h.episodes, strict=True)
    ]
    late = [found for found, _ in pairs if found.seed % 3 == 0]
    assert 0 < len(late) < len(pairs)
    for found, expected in pairs:
        if found.seed % 3:
            assert found == expected
        else:
            assert found.error is not None
            assert f"took more than {seconds:g} s (`environment.timeout`)" in found.error
            assert f"`{place}` of environment" in found.error


def test_time_that_another_call_blocks_is_not_counted() -> None:
    blocked = Stuck(way="sleep", one_in=3)

    class Others(Stuck):
        def start(self, task: Task, agents: Sequence[str], seed: int) -> StuckState:
            if seed % 3 == 0:
                return blocked.start(task, agents, seed)
            world = super().start(task, agents, seed)
            step = world.step

            async def slow(actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
                await asyncio.sleep(0.05)  # over long before the loop is free again
                return await step(actions, final)

            world.step = slow  # type: ignore[method-assign]
            return world

    groups = run_async(lambda: rollout(stage(Others(), environment=1.0), TASKS, 2, 5))
    episodes = [episode for group in groups for episode in group.episodes]
    assert {episode.error is not None for episode in episodes if episode.seed % 3 == 0} == {True}
    assert {episode.error for episode in episodes if episode.seed % 3} == {None}


async def test_a_request_that_is_never_answered_costs_its_episode() -> None:
    class Silent(ScriptedEngine):
        async def generate(self, request: Request) -> Completion:
            if request.seed % 3 == 0:
                await asyncio.sleep(3600)
            return await super().generate(request)

    setup = stage(Stuck(), engine=0.3)
    setup = replace(setup, engine=Silent({"a": lambda request: "x", "b": lambda request: "y"}))
    groups = await rollout(setup, TASKS, 4, 5)
    errors = [e.error for g in groups for e in g.episodes]
    late = [error for error in errors if error is not None]
    assert 0 < len(late) < len(errors)
    assert all(
        "An answer of policy" in error and "more than 0.3 s (`engine.timeout`)" in error for error in late
    )


async def test_grading_has_a_limit_of_its_own_and_the_world_none_meanwhile() -> None:
    async def graded(seconds: float, **patience: float) -> str | None:
        async def grade(_text: str) -> Grade:
            await asyncio.sleep(seconds)
            return Grade(1.0, "x", "right")

        class Graded(Stuck):
            def start(self, task: Task, agents: Sequence[str], seed: int) -> QuestionState:  # type: ignore[override]
                return QuestionState(task, agents, grade, {})

        [group] = await rollout(stage(Graded(), **patience), TASKS[:1], 1, 5)
        return group.episodes[0].error

    assert "Grading an answer took more than 0.3 s (`grader.timeout`)" in str(await graded(3600, grader=0.3))
    assert await graded(0.8, environment=0.5) is None


async def test_an_episode_has_a_limit_over_all_its_calls() -> None:
    setup = stage(Stuck(), environment=60.0, episode=0.3)
    slow = replace(setup, environment=Stuck(way="await"))
    [group] = await rollout(slow, TASKS[:1], 1, 5)
    assert "The episode took more than 0.3 s (`episode.timeout`)" in str(group.episodes[0].error)
