"""Serves a kapelle environment over OpenEnv's protocol, for clients of openenv-core.

    with serve_openenv(Arithmetic(), ("solver",), Binding(port=8000)) as server:
        print(server.url)

    GenericEnvClient(base_url="http://127.0.0.1:8000"): reset(seed=3, split="test"), step({"message": "…"}), state()

Each WebSocket (`/ws`) has its own episode. Each observation is intended for the agent that moves next. If there are
several agents, an action may specify its `agent`. If agents move simultaneously, their completions are collected one by
one before the environment applies them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from starlette.websockets import WebSocket

from kapelle.environment import Environment, size_of, task_of
from kapelle.errors import KapelleError
from kapelle.rollout.bounded_states import open_state
from kapelle.rollout.outcomes import message_of
from kapelle.rollout.workers.session import WorkerSession
from kapelle.runtime.deadlines import DeadlineExceeded, Patience
from kapelle.runtime.event_loop import LoopThread
from kapelle.services.binding import Binding, log_failure
from kapelle.services.http import MOST_BYTES, Call, HttpServer, JsonAnswer, route
from kapelle.services.sockets import SocketApplication, socket_server
from kapelle.types import Json, Split

SESSIONS = 1024
"""The maximum number of open WebSockets."""
MOST_SEED = 2**53

SCHEMA: Json = {
    "action": {
        "type": "object",
        "properties": {
            "message": {"type": "string", "description": "The agent's text."},
            "agent": {
                "type": ["string", "null"],
                "description": "The agent that moves; null for the one of the observation.",
            },
        },
        "required": ["message"],
    },
    "observation": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "The observation of the next agent to move."},
            "agent": {"type": ["string", "null"]},
            "movers": {"type": "array", "items": {"type": "string"}},
            "rewards": {"type": "object", "description": "The total reward of each agent so far."},
            "success": {"type": ["number", "null"]},
        },
    },
    "state": {
        "type": "object",
        "properties": {"episode_id": {"type": "string"}, "step_count": {"type": "integer"}},
    },
}


class Invalid(Exception):
    """Raised for an invalid message. The text of the exception is the reason."""


class OpenEnvEpisode:
    """The episode of one client, from one reset to the next."""

    def __init__(self, environment: Environment, agents: tuple[str, ...], patience: Patience) -> None:
        self._environment, self._agents, self._patience = environment, agents, patience
        self._session: WorkerSession | None = None
        self._texts: dict[str, str] = {}
        """The completions for the current move that were received before those of the other agents."""
        self._totals: dict[str, float] = {}
        self._reported: dict[str, float] = {}
        """The total reward of each agent in the last response to the agent's own action."""
        self._done = False
        self._steps = 0
        self.state: dict[str, Json] = {"episode_id": None, "step_count": 0}

    async def reset(self, data: Mapping[str, Any]) -> Json:
        """Begin an episode of the task at `index` (or `seed`) of `split`. Raises `Invalid` for invalid values."""
        seed, split = data.get("seed"), data.get("split", "train")
        index = data.get("index", seed)
        for name, value in (("seed", seed), ("index", index)):
            if value is not None and (type(value) is not int or not 0 <= value < MOST_SEED):
                raise Invalid(f"`{name}` must be an integer of at least 0.")
        if split not in ("train", "test"):
            raise Invalid("`split` must be train or test.")
        await self.close()
        chosen: Split = "train" if split == "train" else "test"
        size = size_of(self._environment, chosen)
        if size == 0:
            raise Invalid(f"The {chosen} split has no tasks.")
        task = task_of(self._environment, chosen, (index or 0) % size if size else index or 0)
        session = WorkerSession(open_state, self._environment, self._patience, self._agents)
        await session.reset(task, seed or 0)
        self._session = session
        self._texts, self._done, self._steps = {}, False, 0
        self._totals, self._reported = dict.fromkeys(self._agents, 0.0), dict.fromkeys(self._agents, 0.0)
        self.state = {"episode_id": data.get("episode_id") or task.id, "step_count": 0, "task": task.id}
        return await self._observation(session, None)

    async def step(self, data: Mapping[str, Any]) -> Json:
        """Apply the completion of the given agent or, by default, of the next agent to move. Raises `Invalid` for an invalid action."""
        session = self._session
        if session is None or self._done:
            raise Invalid("The episode has ended or has not begun. Send `reset` first.")
        message, agent = data.get("message"), data.get("agent")
        waiting = [name for name in session.state.movers() if name not in self._texts]
        if not isinstance(message, str):
            raise Invalid("`message` must be a string.")
        if agent is None:
            agent = waiting[0]
        if agent not in waiting:
            raise Invalid(f"`agent` must be one of {', '.join(waiting)}.")
        self._texts[agent] = message
        if len(waiting) == 1:
            actions, self._texts = self._texts, {}
            answer = await session.answer({"call": "act", "actions": actions, "final": None})
            self._add(answer["rewards"])
        self._steps += 1
        self.state["step_count"] = self._steps
        return await self._observation(session, agent)

    async def _observation(self, session: WorkerSession, mover: str | None) -> Json:
        """Return the observation and the reward after a move of the agent `mover`."""
        movers = session.state.movers()
        success: float | None = None
        if not movers:
            outcome = await session.answer({"call": "outcome"})
            success, self._done = outcome["success"], True
            self._add(outcome["rewards"])
        waiting = [name for name in movers if name not in self._texts]
        reader = waiting[0] if waiting else mover or self._agents[0]
        reward = None
        if mover is not None:
            reward = self._totals[mover] - self._reported[mover]
            self._reported[mover] = self._totals[mover]
        observation: Json = {
            "text": session.state.observe(reader),
            "agent": waiting[0] if waiting else None,
            "movers": list(waiting),
            "rewards": dict(self._totals),
            "success": success,
        }
        return {"observation": observation, "reward": reward, "done": self._done}

    async def close(self) -> None:
        """Close the episode if one is open."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _add(self, rewards: Mapping[str, float]) -> None:
        for name, reward in rewards.items():
            self._totals[name] += reward


class OpenEnvApplication(SocketApplication):
    """An application with the routes and the WebSocket of the protocol."""

    def __init__(
        self,
        environment: Environment,
        agents: Sequence[str],
        binding: Binding,
        loop: LoopThread,
        patience: Patience,
    ) -> None:
        """Create an application that serves episodes with the given agents, in the order of their roles, on the thread `loop`."""
        self._new = partial(OpenEnvEpisode, environment, tuple(agents), patience)
        self._loop = loop
        about: Json = {
            "name": environment.name,
            "description": f"{environment.name} of kapelle, played by {', '.join(agents)}",
        }
        routes = [
            route("GET", "/health", self._constant({"status": "healthy"})),
            route("GET", "/metadata", self._constant(about)),
            route("GET", "/schema", self._constant(SCHEMA)),
        ]
        full = f"{SESSIONS} sessions are open, which is the limit."
        super().__init__(binding, routes, "/ws", self._talk, SESSIONS, full)

    def _constant(self, value: Json) -> Callable[[Call], Awaitable[JsonAnswer]]:
        async def answer(_call: Call) -> JsonAnswer:
            return JsonAnswer(value)

        return answer

    async def _talk(self, socket: WebSocket) -> None:
        episode = self._new()
        try:
            while (answer := await self._reply(episode, await socket.receive_text())) is not None:
                await socket.send_text(json.dumps(answer, allow_nan=False))
            await socket.close()
        finally:
            with suppress(Exception):
                await self._loop.ask(episode.close)

    async def _reply(self, episode: OpenEnvEpisode, text: str) -> Json | None:
        """Return the response to a message, or None for the message `close`."""
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            return _error("The message is not JSON.", "INVALID_JSON")
        kind = message.get("type") if isinstance(message, dict) else None
        data = message.get("data", {}) if isinstance(message, dict) else {}
        if kind not in ("reset", "step", "state", "close"):
            return _error(f"Unknown message type: {kind!r:.40}", "UNKNOWN_TYPE")
        if not isinstance(data, dict):
            return _error("`data` must be an object.", "VALIDATION_ERROR")
        if kind == "close":
            return None
        if kind == "state":
            return {"type": "state", "data": episode.state}
        move = episode.reset if kind == "reset" else episode.step
        try:
            return {"type": "observation", "data": await self._loop.ask(lambda: move(data))}
        except Invalid as error:
            return _error(str(error), "VALIDATION_ERROR")
        except (KapelleError, DeadlineExceeded) as error:
            return _error(message_of(error), "EXECUTION_ERROR")
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the one boundary where an environment's error becomes an answer
            log_failure("An environment that is served over OpenEnv failed.", error)
            return _error("The environment failed; see the server's log.", "EXECUTION_ERROR")


def _error(message: str, code: str) -> Json:
    return {"type": "error", "data": {"message": message[:1000], "code": code}}


@contextmanager
def serve_openenv(
    environment: Environment, agents: Sequence[str], binding: Binding, call_seconds: float = 600.0
) -> Iterator[HttpServer]:
    """Serve an environment for the given agents, in the order of their roles, while the block runs. Raises the errors of `check`."""
    environment.check(agents)
    patience = Patience(environment=call_seconds, grader=call_seconds)
    with LoopThread() as loop:
        application = OpenEnvApplication(environment, agents, binding, loop, patience)
        with socket_server(binding, application, MOST_BYTES) as server:
            yield server
