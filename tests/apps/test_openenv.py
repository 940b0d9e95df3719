"""Servers of the real package openenv-core, played by teams (`make test-apps`)."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.workflows.stage import lines, play

from kapelle.environments.adapters.openenv import OpenEnv
from kapelle.rollout.conformance import conform
from kapelle.types import Episode
from kapelle.workflow import Workflow
from kapelle.workflows.chain import Chain
from kapelle.workflows.play import PlayWorkflow

pytestmark = pytest.mark.apps
core = pytest.importorskip("openenv.core")
servers = pytest.importorskip("openenv.core.env_server")
uvicorn = pytest.importorskip("uvicorn")


class Words(core.Action):  # type: ignore[misc, name-defined]
    message: str


class Number(core.Action):  # type: ignore[misc, name-defined]
    value: int


class Pair(core.Action):  # type: ignore[misc, name-defined]
    row: int
    column: int


class Heard(core.Observation):  # type: ignore[misc, name-defined]
    echo: str = ""
    left: int | None = None


class Echo(servers.Environment):  # type: ignore[misc, name-defined]
    """Says what it hears; three moves, each worth 0.25, and nothing for the word `nothing`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = servers.State(episode_id="e", step_count=0)

    def reset(self, seed: int | None = None, **given: Any) -> Heard:
        self._state = servers.State(episode_id="e", step_count=0, seed=seed)
        return Heard(echo=f"seed {seed}{given.get('suffix', '')}")

    def step(self, action: Any, **given: Any) -> Heard:
        said = str(getattr(action, "message", None) or action.model_dump(exclude={"metadata"}))
        self._state.step_count += 1
        if said == "raise":
            raise RuntimeError("the echo is broken")
        if said == "sleep":
            time.sleep(3.0)
        reward: Any = {"nothing": None, "rich": 7.0}.get(said, 0.25)
        return Heard(echo=said, reward=reward, done=self._state.step_count == 3)

    @property
    def state(self) -> Any:
        return self._state


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def serving(app: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)

    def stop() -> None:
        server.force_exit = server.should_exit = True
        thread.join(10)

    try:
        yield f"http://127.0.0.1:{port}", stop
    finally:
        stop()


@contextmanager
def echoing(action: type = Words, most: int = 4) -> Iterator[tuple[str, Callable[[], None]]]:
    with serving(servers.create_app(Echo, action, Heard, max_concurrent_envs=most)) as served:
        yield served


async def one(environment: OpenEnv, *texts: str, workflow: Workflow | None = None, **rest: Any) -> Episode:
    task = environment.task("train", 3)
    (episode,) = await play(
        environment, workflow or PlayWorkflow(), ["a"], {"a": lines(*texts)}, task, **rest
    )
    return episode


def test_each_step_of_an_episode_is_shown_and_paid() -> None:
    with echoing() as (url, _):
        environment = OpenEnv(url=url, observation="echo", arguments={"suffix": "!"})
        remembering = PlayWorkflow(memory="conversation")
        episode = asyncio.run(one(environment, "x", "nothing", "z", workflow=remembering))
        assert episode.error is None
        assert [turn.new_messages[-1].content for turn in episode.turns] == ["seed 6!", "x", "nothing"]
        assert [turn.reward for turn in episode.turns] == [0.25, 0.0, 0.25]
        assert (episode.info["steps"], episode.info["total"]) == (3, 0.5)
        assert episode.info["state"] == {"seed": 6, "step_count": 3}
        assert not episode.truncated
        cut = asyncio.run(one(OpenEnv(url=url, max_steps=2), "x", "y", workflow=remembering))
        assert cut.truncated
        assert len(cut.turns) == 2


def test_the_server_ends_a_session_itself_and_logs_no_error() -> None:
    logged: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("uvicorn.error")
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    with echoing() as (url, _):
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        try:
            for _ in range(4):
                assert asyncio.run(one(OpenEnv(url=url), "x", "y", "z")).error is None
        finally:
            logger.removeHandler(handler)
    assert logged == []


def test_a_chain_works_on_each_move() -> None:
    with echoing() as (url, _):
        environment = OpenEnv(url=url)
        said = {"planner": lines("1", "2", "3"), "player": lines("x", "y", "z")}
        (episode,) = asyncio.run(
            play(environment, Chain(), ["planner", "player"], said, environment.task("test", 0))
        )
        assert episode.error is None
        assert episode.turns[0].new_messages[-1].content == "seed 1"
        assert episode.turns[3].new_messages[-1].content == "x\n\nplanner: 2"


def test_the_action_follows_from_the_schema() -> None:
    remembering = PlayWorkflow(memory="conversation")
    with echoing(Number) as (url, _):
        episode = asyncio.run(one(OpenEnv(url=url), "4", "four", "5", "6", workflow=remembering))
        assert episode.error is None
        assert "whole number" in episode.turns[0].new_messages[-1].content
        assert "not an action" in episode.turns[2].new_messages[-1].content
        assert (episode.info["no_actions"], episode.info["steps"]) == (1, 4)
    with echoing(Pair) as (url, _):
        good, bad = 'I take {"row": 1, "column": 2}', '{"row": 1, "column": "x"}'
        episode = asyncio.run(one(OpenEnv(url=url), bad, good, good, good, workflow=remembering))
        assert episode.error is None
        assert '"column"' in episode.turns[0].new_messages[-1].content
        assert "Error: " in episode.turns[1].new_messages[-1].content
        assert episode.turns[2].new_messages[-1].content == "{'row': 1, 'column': 2}"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("raise", "the echo is broken"),
        ("sleep", "did not answer `step` within 1 s"),
        ("rich", "outside the declared range"),
    ],
)
def test_what_the_server_breaks_fails_the_episode(said: str, why: str) -> None:
    with echoing() as (url, _):
        environment = OpenEnv(url=url, attempt_s=1.0)
        episode = asyncio.run(one(environment, said, "x", "y"))
        assert episode.error is not None
        assert why in episode.error


def test_more_episodes_than_sessions_wait_for_one_another() -> None:
    with echoing(most=1) as (url, _):
        environment = OpenEnv(url=url)
        said = {"a": lines("x", "y", "z")}
        task = environment.task("train", 0)
        remembering = PlayWorkflow(memory="conversation")
        episodes = asyncio.run(play(environment, remembering, ["a"], said, task, samples=4))
        assert [episode.error for episode in episodes] == [None] * 4


def test_a_server_that_dies_fails_what_is_played_and_what_comes_after() -> None:
    with echoing() as (url, stop):

        async def run() -> tuple[str, str]:
            environment = OpenEnv(url=url, attempt_s=2.0)
            world = environment.start(environment.task("train", 0), ["a"], 0)
            await world.reset()
            await asyncio.to_thread(stop)
            with pytest.raises(Exception, match=r"closed the session|did not answer") as lost:
                await world.step({"a": "x"})
            await world.close()
            after = await one(environment, "x")
            return str(lost.value), after.error or ""

        _, after = asyncio.run(run())
        assert "Cannot open a session on the OpenEnv server" in after


def test_nonsense_is_refused() -> None:
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route, WebSocketRoute

    answers = iter(
        [
            "no json",
            "[1]",
            '{"type": "observation"}',
            '{"type": "observation", "data": {"observation": 3}}',
            '{"type": "observation", "data": {"observation": {}, "reward": NaN}}',
            "x" * (5 << 20),
        ]
    )

    async def ws(socket: Any) -> None:
        await socket.accept()
        await socket.receive_text()
        await socket.send_text(next(answers))
        await socket.close()

    async def schema(_request: Any) -> JSONResponse:
        return JSONResponse({"action": {"properties": {"message": {"type": "string"}}}})

    app = Starlette(routes=[Route("/schema", schema), WebSocketRoute("/ws", ws)])
    with serving(app) as (url, _):
        for why in [
            "not JSON",
            "answered `reset`",
            "answered `reset`",
            "observation",
            "not a finite number",
            "closed the session",
        ]:
            episode = asyncio.run(one(OpenEnv(url=url, attempt_s=5.0), "x"))
            assert episode.error is not None
            assert why in episode.error


def test_it_conforms() -> None:
    with echoing() as (url, _):
        findings = asyncio.run(conform(OpenEnv(url=url), tasks=2))
        assert not [f for f in findings if f.status == "failed"]
