"""Episodes whose episode states live in other processes are, in every field, those played in this one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from tests.environments.test_conformance import READY
from tests.support.tiny import team_of

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import Environment, Scripted, environment_class, offers, task_of
from kapelle.errors import ConfigError
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.rollout.workers.pool import EnvironmentWorkers, HeldHere, Hold
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.event_loop import run_async
from kapelle.types import Group
from kapelle.workflow import Workflow, workflow_class

FAR = 120.0
"""Seconds that no test needs."""


def play_of(environment: Environment, workflow: Workflow, names: Sequence[str], **over: Any) -> RolloutSetup:
    def answer(request: Any) -> str:
        if offers(environment, Scripted) and request.seed % 3:
            return environment.script(request.agent, request.task, request.messages, request.seed)
        return f"{request.seed % 7}" if request.seed % 5 else "nonsense <tool> \x00 é"

    return RolloutSetup(
        team_of(*names), environment, workflow, ScriptedEngine(dict.fromkeys(names, answer)), **over
    )


def seats(environment: Environment, workflow: str) -> tuple[str, ...]:
    """Return the agents of a team that can play it; empty where none can."""
    for count in (2, 1, 3):
        names = ("ann", "ben", "cat")[:count]
        try:
            environment.check(names)
            workflow_class(workflow)(name=workflow).check(team_of(*names).agents, environment)
        except ConfigError:
            continue
        return names
    return ()


def workflows_for(environment: Environment) -> dict[str, tuple[str, ...]]:
    named = ("solo", "chain", "debate", "reflect", "vote", "cory", "parallel", "play", "tool_use")
    return {name: names for name in named if (names := seats(environment, name))}


def episodes(
    environment: Environment, workers: int, tasks: int = 3, hold: Hold = HeldHere
) -> dict[str, list[Group]]:
    """Return what each workflow makes of the first tasks, with episode states here (0) or in so many processes."""
    found = [task_of(environment, "train", k) for k in range(tasks)]
    pool = EnvironmentWorkers(environment, workers, Patience(), hold) if workers else None
    played = {}
    try:
        for name, names in workflows_for(environment).items():
            workflow = cast("Workflow", workflow_class(name)(name=name))
            setup = play_of(environment, workflow, names, workers=pool)
            played[name] = run_async(lambda p=setup: asyncio.wait_for(rollout(p, found, 3, 11), FAR))  # type: ignore[misc]
    finally:
        if pool is not None:
            pool.close()
    return played


def assert_same(environment: Environment, workers: int = 1, hold: Hold = HeldHere) -> None:
    here, there = episodes(environment, 0), episodes(environment, workers, hold=hold)
    assert here, "some workflow plays it"
    assert there == here


def test_a_game_is_the_same() -> None:
    assert_same(environment_class("matrix")())


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["arithmetic", "debate_topics", "mixture", "tools"])
def test_a_built_in_environment_is_the_same(name: str) -> None:
    assert_same(environment_class(name)(**READY[name]))


@pytest.mark.long
@pytest.mark.slow
def test_openspiel_is_the_same() -> None:
    pytest.importorskip("pyspiel")
    assert_same(environment_class("openspiel")())
