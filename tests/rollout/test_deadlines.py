"""Whatever a call of an environment does, its episode ends in time and the others do not notice."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from tests.support.stuck import Stuck
from tests.support.tiny import team_of

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import Environment
from kapelle.rollout.play import Play, rollout
from kapelle.runtime import deadlines
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.event_loop import run_async
from kapelle.types import Task
from kapelle.workflows.parallel import Parallel

WAYS = ["sleep", "lock", "spin", "swallow", "await", "deaf", "child"]
SYNC = {"start", "observe", "outcome"}


def stage(world: Environment, **patience: float) -> Play:
    return Play(
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


def test_threads_end_with_worlds_that_block() -> None:
    before = threading.active_count()
    run_async(lambda: rollout(stage(Stuck(blocking=True)), TASKS, 4, 5))
    end = time.monotonic() + 30
    while threading.active_count() > before + 1 and time.monotonic() < end:
        time.sleep(0.05)
    assert threading.active_count() <= before + 1  # the watchdog
