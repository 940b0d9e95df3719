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

from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from kapelle.environment import Environment, RemoteWorld, size_of, task_of
from kapelle.errors import KapelleError
from kapelle.rollout.bounded_worlds import BoundedWorld, open_world
from kapelle.rollout.outcomes import payments, plain_outcome, said
from kapelle.runtime.deadlines import GaveUp, Patience, patience_here
from kapelle.runtime.event_loop import LoopThread
from kapelle.services.binding import Binding, log_failure
from kapelle.services.http import Application, Call, HttpServer, JsonAnswer, check_call, headers_of, route
from kapelle.services.refusals import Refusal, wrong
from kapelle.types import Json, Split

SESSIONS = 1024
"""WebSockets with worlds at once; a further one is told that there is no room."""
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
        self._world: BoundedWorld | RemoteWorld | None = None
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
        patience_here.set(self._patience)
        self._world = await open_world(self._environment, task, self._agents, seed or 0, self._patience)
        self._said, self._done = {}, False
        self._earned, self._told = dict.fromkeys(self._agents, 0.0), dict.fromkeys(self._agents, 0.0)
        self.state = {"episode_id": data.get("episode_id") or task.id, "step_count": 0, "task": task.id}
        return await self._shown(None)

    async def step(self, data: Mapping[str, Any]) -> Json:
        """Say something for the agent that is to move, or the one that is named; Invalid for what does not fit."""
        world = self._world
        if world is None or self._done:
            raise Invalid("The episode is over or has not begun: reset first.")
        message, who = data.get("message"), data.get("agent")
        waiting = [name for name in world.movers() if name not in self._said]
        if not isinstance(message, str):
            raise Invalid("`message` is a text.")
        if who is None:
            who = waiting[0]
        if who not in waiting:
            raise Invalid(f"`agent` is one of {', '.join(waiting)}.")
        self._said[who] = message
        if len(waiting) == 1:
            actions, self._said = self._said, {}
            patience_here.set(self._patience)
            for name, paid in payments(await world.step(actions), self._agents).items():
                self._earned[name] += paid
        count = self.state["step_count"]
        assert isinstance(count, int), "it counts"
        self.state["step_count"] = count + 1
        return await self._shown(who)

    async def _shown(self, who: str | None) -> Json:
        assert self._world is not None, "it was reset"
        movers = self._world.movers()
        success: float | None = None
        if not movers:
            found = await self._world.outcome()
            ended = plain_outcome(found, payments(found.rewards, self._agents))
            success, self._done = ended.success, True
            for name, paid in ended.rewards.items():
                self._earned[name] += paid
        waiting = [name for name in movers if name not in self._said]
        reads = waiting[0] if waiting else who or self._agents[0]
        reward = None
        if who is not None:
            reward = self._earned[who] - self._told[who]
            self._told[who] = self._earned[who]
        observation: Json = {
            "text": self._world.observe(reads),
            "agent": waiting[0] if waiting else None,
            "movers": list(waiting),
            "rewards": dict(self._earned),
            "success": success,
        }
        return {"observation": observation, "reward": reward, "done": self._done}

    async def close(self) -> None:
        """Close the world, if there is one."""
        world, self._world = self._world, None
        if world is not None:
            await world.close()


class OpenEnvApplication(Application):
    """The routes of the protocol, and its WebSocket behind the same check of callers."""

    def __init__(
        self,
        environment: Environment,
        agents: Sequence[str],
        binding: Binding,
        worlds: LoopThread,
        patience: Patience,
    ) -> None:
        self._new = partial(OneWorld, environment, tuple(agents), patience)
        self._worlds, self._bound = worlds, binding
        self._plain, self._turn, self._open = self._new(), asyncio.Lock(), 0
        self._about: Json = {
            "name": environment.name,
            "description": f"{environment.name} of kapelle, played by {', '.join(agents)}",
        }
        routes = [
            route("GET", "/health", self._constant({"status": "healthy"})),
            route("GET", "/metadata", self._constant(self._about)),
            route("GET", "/schema", self._constant(SCHEMA)),
            route("GET", "/state", self._state),
            route("POST", "/reset", self._reset),
            route("POST", "/step", self._step),
        ]
        super().__init__(binding, routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call, or one WebSocket from its opening to its end."""
        if scope["type"] != "websocket":
            await super().__call__(scope, receive, send)
            return
        try:
            # A page of another site may open a WebSocket without asking: so it counts as a call that acts.
            check_call(self._bound, "POST", headers_of(scope))
        except Refusal:
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["path"] != "/ws":
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._talk(WebSocket(scope, receive, send))

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
        await socket.accept()
        if self._open >= SESSIONS:
            await socket.send_text(
                _error(f"{SESSIONS} sessions are open, the most there may be.", "CAPACITY_REACHED")
            )
            await socket.close()
            return
        self._open += 1
        own = self._new()
        try:
            while (answer := await self._heard(own, await socket.receive_text())) is not None:
                await socket.send_text(answer)
            await socket.close()
        except (WebSocketDisconnect, RuntimeError, KeyError):  # the client is gone, or has sent bytes
            pass
        finally:
            self._open -= 1
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
        with HttpServer(binding, application, sockets=True) as server:
            yield server
