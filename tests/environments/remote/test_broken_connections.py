"""A run whose connection breaks plays the episodes again from their start; no world is told anything twice."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from tests.environments.remote.test_servers import FAR, serve
from tests.services.environments.conftest import eventually
from tests.services.environments.slow_world import Waiting, WaitingWorld
from tests.support.breaking import Point, breaking
from tests.support.tiny import team_of

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import Environment, task_of
from kapelle.environments.remote import Remote
from kapelle.rollout.episodes import rollout
from kapelle.rollout.play import Play
from kapelle.runtime.event_loop import run_async
from kapelle.setup.preparation import connect
from kapelle.types import Group
from kapelle.workflow import workflow_class

AGENTS = ("ann", "ben")


def three_moves(request: Any) -> str:
    seen = request.messages[-1].content
    return "over" if "two" in seen else f"{'two' if 'one' in seen else 'one'} {request.seed}"


def play(environment: Environment) -> list[Group]:
    workflow: Any = workflow_class("play")(name="play")
    engine = ScriptedEngine(dict.fromkeys(AGENTS, three_moves))
    tasks = [task_of(environment, "test", k) for k in range(4)]
    played = Play(team_of(*AGENTS), environment, workflow, engine)
    return run_async(lambda: asyncio.wait_for(rollout(played, tasks, 2, 3), FAR))


@pytest.mark.parametrize("move", [0, 1])
@pytest.mark.parametrize("point", get_args(Point))
def test_no_world_is_told_a_move_twice(point: Point, move: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[WaitingWorld, list[Any]] = defaultdict(list)
    step = WaitingWorld.step

    async def noted(world: WaitingWorld, actions: Any, final: str | None = None) -> Any:
        told[world].append((actions, final))
        return await step(world, actions, final)

    monkeypatch.setattr(WaitingWorld, "step", noted)
    # The relay looks for a move in what is sent, which a client masks with random bytes.
    monkeypatch.setattr("websockets.frames.secrets", SimpleNamespace(token_bytes=bytes))
    here = play(Waiting())
    whole = list(told.values())
    assert [len(moves) for moves in whole] == [3] * 8
    told.clear()
    spoken = [turn.text for turn in here[0].episodes[0].turns if turn.agent == "ann"]
    with serve(Waiting()) as server, breaking(server.address, point, spoken[move].encode()) as relay:
        remote = Remote(address=(relay.address,), retry_seconds=30.0)
        connect(remote)
        assert play(remote) == here
        assert relay.broken.is_set()
        eventually(lambda: len(server.host.sessions) == 0)
    lost = [moves for moves in told.values() if moves not in whole]
    assert len(told) - len(lost) == len(whole), "every episode has a world that was told all of it"
    assert all(any(moves == all_of[: len(moves)] for all_of in whole) for moves in lost)
    if point != "before it is sent":
        assert lost, "the world of the move whose answer was lost is not played on"
