"""An environment of kapelle's as a server of OpenEnv's protocol, for clients of openenv-core.

    with serve_openenv(Arithmetic(), ("solver",), Binding(port=8000)) as server:
        print(server.url)

    GenericEnvClient(base_url="http://127.0.0.1:8000"): reset(seed=3, split="test"), step({"message": "…"}), state()

Each WebSocket (`/ws`) has a world of its own. Plain calls (`/reset`, `/step`, `/state`) share one. An observation shows the agent
that is to move; where several agents play, an action may name its `agent`, and agents that move at once are heard one after
another before the world moves.
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
from kapelle.rollout.bounded_worlds import open_world
from kapelle.rollout.outcomes import said
from kapelle.rollout.workers.session import WorkerSession
from kapelle.runtime.deadlines import GaveUp, Patience
from kapelle.runtime.event_loop import LoopThread
from kapelle.services.binding import Binding, log_failure
from kapelle.services.http import MOST_BYTES, Call, HttpServer, JsonAnswer, route
from kapelle.services.refusals import Refusal, wrong
from kapelle.services.sockets import SocketApplication, socket_server
from kapelle.types import Json, Split

SESSIONS = 1024
"""WebSockets with worlds at once."""
FULL = f"{SESSIONS} sessions are open, the most there may be."
MOST_SEED = 2**53

SCHEMA: Json = {
    "action": {
        "type": "object",
        "properties": {
            "message": {"type": "string", "description": "What the agent says."},
            "agent": {
                "type": ["string", "null"],
                "description": "Who says it; null for the one in the observation.",
            },
        },
        "required": ["message"],
    },
    "observation": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "What the agent that is to move sees."},
            "agent": {"type": ["string", "null"]},
            "movers": {"type": "array", "items": {"type": "string"}},
            "rewards": {"type": "object", "description": "What each agent has earned so far."},
            "success": {"type": ["number", "null"]},
        },
    },
    "state": {
        "type": "object",
        "properties": {"episode_id": {"type": "string"}, "step_count": {"type": "integer"}},
    },
}


class Invalid(Exception):
    """A message that does not fit; the text says why."""


class OneWorld:
    """The world of one client, from one reset to the next."""

    def __init__(self, environment: Environment, agents: tuple[str, ...], patience: Patience) -> None:
        self._environment, self._agents, self._patience = environment, agents, patience
        self._session: WorkerSession | None = None
        self._said: dict[str, str] = {}
        self._earned: dict[str, float] = {}
        self._told: dict[str, float] = {}
        """What each agent has earned by the last answer to an action of its own."""
        self._done = False
        self.state: dict[str, Json] = {"episode_id": None, "step_count": 0}

    async def reset(self, data: Mapping[str, Any]) -> Json:
        """Begin an episode: the task by `index` (or `seed`) of `split`; Invalid for other values."""
        seed, split = data.get("seed"), data.get("split", "train")
        index = data.get("index", seed)
        for name, value in (("seed", seed), ("index", index)):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MOST_SEED
            ):
                raise Invalid(f"`{name}` is a whole number from 0.")
        if split not in ("train", "test"):
            raise Invalid("`split` is train or test.")
        await self.close()
        chosen: Split = "train" if split == "train" else "test"
        size = size_of(self._environment, chosen)
        if size == 0:
            raise Invalid(f"The {chosen} split has no task.")
        task = task_of(self._environment, chosen, (index or 0) % size if size else index or 0)
        session = WorkerSession(open_world, self._environment, self._patience, self._agents)
        await session.reset(task, seed or 0)
        self._session = session
        self._said, self._done = {}, False
        self._earned, self._told = dict.fromkeys(self._agents, 0.0), dict.fromkeys(self._agents, 0.0)
        self.state = {"episode_id": data.get("episode_id") or task.id, "step_count": 0, "task": task.id}
        return await self._shown(None)

    async def step(self, data: Mapping[str, Any]) -> Json:
        """Say something for the agent that is to move, or the one that is named; Invalid for what does not fit."""
        session = self._session
        if session is None or self._done:
            raise Invalid("The episode is over or has not begun: reset first.")
        message, who = data.get("message"), data.get("agent")
        waiting = [name for name in session.world.movers() if name not in self._said]
        if not isinstance(message, str):
            raise Invalid("`message` is a text.")
        if who is None:
            who = waiting[0]
        if who not in waiting:
            raise Invalid(f"`agent` is one of {', '.join(waiting)}.")
        self._said[who] = message
        if len(waiting) == 1:
            actions, self._said = self._said, {}
            answer = await session.answer({"call": "act", "actions": actions, "final": None})
            self._earn(answer["rewards"])
        count = self.state["step_count"]
        assert isinstance(count, int), "it counts"
        self.state["step_count"] = count + 1
        return await self._shown(who)

    async def _shown(self, who: str | None) -> Json:
        assert self._session is not None, "it was reset"
        movers = self._session.world.movers()
        success: float | None = None
        if not movers:
            ended = await self._session.answer({"call": "outcome"})
            success, self._done = ended["success"], True
            self._earn(ended["rewards"])
        waiting = [name for name in movers if name not in self._said]
        reads = waiting[0] if waiting else who or self._agents[0]
        reward = None
        if who is not None:
            reward = self._earned[who] - self._told[who]
            self._told[who] = self._earned[who]
        observation: Json = {
            "text": self._session.world.observe(reads),
            "agent": waiting[0] if waiting else None,
            "movers": list(waiting),
            "rewards": dict(self._earned),
            "success": success,
        }
        return {"observation": observation, "reward": reward, "done": self._done}

    async def close(self) -> None:
        """Close the world, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _earn(self, rewards: Mapping[str, float]) -> None:
        for name, paid in rewards.items():
            self._earned[name] += paid


class OpenEnvApplication(SocketApplication):
    """The routes of the protocol, and its WebSocket."""

    def __init__(
        self,
        environment: Environment,
        agents: Sequence[str],
        binding: Binding,
        worlds: LoopThread,
        patience: Patience,
    ) -> None:
        """Let these agents play, in seat order; their worlds live on the thread `worlds`."""
        self._new = partial(OneWorld, environment, tuple(agents), patience)
        self._worlds = worlds
        self._plain, self._turn = self._new(), asyncio.Lock()
        about: Json = {
            "name": environment.name,
            "description": f"{environment.name} of kapelle, played by {', '.join(agents)}",
        }
        routes = [
            route("GET", "/health", self._constant({"status": "healthy"})),
            route("GET", "/metadata", self._constant(about)),
            route("GET", "/schema", self._constant(SCHEMA)),
            route("GET", "/state", self._state),
            route("POST", "/reset", self._reset),
            route("POST", "/step", self._step),
        ]
        super().__init__(binding, routes, "/ws", self._talk, SESSIONS, FULL)

    def _constant(self, said: Json) -> Callable[[Call], Awaitable[JsonAnswer]]:
        async def answer(_call: Call) -> JsonAnswer:
            return JsonAnswer(said)

        return answer

    async def _state(self, _call: Call) -> JsonAnswer:
        return JsonAnswer(self._plain.state)

    async def _reset(self, call: Call) -> JsonAnswer:
        body = call.body if isinstance(call.body, dict) else {}
        return await self._plainly(lambda: self._plain.reset(body))

    async def _step(self, call: Call) -> JsonAnswer:
        action = call.body.get("action") if isinstance(call.body, dict) else None
        if not isinstance(action, dict):
            raise wrong("`action` is an object.", "action")
        return await self._plainly(lambda: self._plain.step(action))

    async def _plainly(self, work: Callable[[], Any]) -> JsonAnswer:
        async with self._turn:
            try:
                return JsonAnswer(await self._worlds.ask(work))
            except Invalid as error:
                raise Refusal(422, str(error), None, "invalid_action") from None
            except (KapelleError, GaveUp) as error:
                raise Refusal(500, said(error), None, "world_failed") from None

    async def _talk(self, socket: WebSocket) -> None:
        own = self._new()
        try:
            while (answer := await self._heard(own, await socket.receive_text())) is not None:
                await socket.send_text(answer)
            await socket.close()
        finally:
            with suppress(Exception):
                await self._worlds.ask(own.close)

    async def _heard(self, own: OneWorld, text: str) -> str | None:
        """Return the answer to a message; None for `close`."""
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            return _error("The message is no JSON.", "INVALID_JSON")
        kind = message.get("type") if isinstance(message, dict) else None
        data = message.get("data", {}) if isinstance(message, dict) else {}
        if kind not in ("reset", "step", "state", "close"):
            return _error(f"Unknown message type: {kind!r:.40}", "UNKNOWN_TYPE")
        if not isinstance(data, dict):
            return _error("`data` is an object.", "VALIDATION_ERROR")
        if kind == "close":
            return None
        try:
            if kind == "state":
                return _text({"type": "state", "data": own.state})
            work = own.reset if kind == "reset" else own.step
            return _text({"type": "observation", "data": await self._worlds.ask(lambda: work(data))})
        except Invalid as error:
            return _error(str(error), "VALIDATION_ERROR")
        except (KapelleError, GaveUp) as error:
            return _error(said(error), "EXECUTION_ERROR")
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the one boundary where what a world raises becomes an answer
            log_failure("A world that is played over OpenEnv failed.", error)
            return _error("The world failed; the server's log says why.", "EXECUTION_ERROR")


def _text(said: Json) -> str:
    return json.dumps(said, allow_nan=False)


def _error(message: str, code: str) -> str:
    return _text({"type": "error", "data": {"message": message[:1000], "code": code}})


@contextmanager
def serve_openenv(
    environment: Environment, agents: Sequence[str], binding: Binding, call_seconds: float = 600.0
) -> Iterator[HttpServer]:
    """Serve an environment for these agents, in seat order, while the block runs; raises what `check` raises."""
    environment.check(agents)
    patience = Patience(environment=call_seconds, grader=call_seconds)
    with LoopThread() as worlds:
        application = OpenEnvApplication(environment, agents, binding, worlds, patience)
        with socket_server(binding, application, MOST_BYTES) as server:
            yield server
