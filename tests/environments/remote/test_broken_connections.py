"""After a broken connection a run restarts its episodes; no environment gets a move twice."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, get_args

import pytest

pytest.importorskip("websockets")

from tests.environments.remote.test_servers import FAR, serve
from tests.services.environments.conftest import eventually
from tests.services.environments.slow_world import Waiting, WaitingState
from tests.support.breaking import Point, breaking
from tests.support.tiny import team_of

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import Environment, task_of
from kapelle.environments.remote import Remote
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
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
    played = RolloutSetup(team_of(*AGENTS), environment, workflow, engine)
    return run_async(lambda: asyncio.wait_for(rollout(played, tasks, 2, 3), FAR))


@pytest.mark.parametrize("point", get_args(Point))
def test_no_environment_gets_a_move_twice(point: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    moves_of: dict[WaitingState, list[Any]] = defaultdict(list)
    step = WaitingState.step

    async def noted(world: WaitingState, actions: Any, final: str | None = None) -> Any:
        moves_of[world].append((actions, final))
        return await step(world, actions, final)

    monkeypatch.setattr(WaitingState, "step", noted)
    # The relay searches the traffic for a move; a mask of zeros keeps it readable.
    monkeypatch.setattr("websockets.frames.secrets", SimpleNamespace(token_bytes=bytes))
    here = play(Waiting())
    whole = list(moves_of.values())
    assert [len(moves) for moves in whole] == [3] * 8
    moves_of.clear()
    texts = [turn.text for turn in here[0].episodes[0].turns if turn.agent == "ann"]
    with serve(Waiting()) as server, breaking(server.address, point, texts[1].encode()) as relay:
        remote = Remote(address=(relay.address,), retry_seconds=30.0)
        connect(remote)
        assert play(remote) == here
        assert relay.broken.is_set()
        eventually(lambda: len(server.host.sessions) == 0)
    lost = [moves for moves in moves_of.values() if moves not in whole]
    assert len(moves_of) - len(lost) == len(whole), "every episode has one environment with all moves"
    assert all(any(moves == all_of[: len(moves)] for all_of in whole) for moves in lost)
    if point != "before it is sent":
        assert lost, "the environment with a lost answer gets no more moves"
