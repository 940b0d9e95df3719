"""Environments behind a server that speaks OpenEnv's protocol (openenv-core 0.2 and 0.3): `reset`, `step`, `state`.

    environment: {name: openenv, url: "http://127.0.0.1:8000"}

Each episode has a session of its own over a WebSocket, as in the package's own client. Over plain HTTP a server of that
package makes a new environment for every call; `transport: http` is for servers that keep one between calls, which then
play one episode at a time.

The server is another program. Its answers are bounded in bytes and seconds, rewards have to be finite numbers, and a
server that is gone, or answers nonsense, fails the episode.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from kapelle.environment import (
    Alive,
    AskedServer,
    AsksServers,
    Described,
    Holding,
    OneSeat,
    Outcome,
    Resets,
    Scripted,
)
from kapelle.environments.base import BaseWorld, Endless, StatedRewards
from kapelle.environments.questions import need_seats
from kapelle.environments.taught import WithTeacher
from kapelle.errors import AbsentPackage, EpisodeError, did_you_mean
from kapelle.runtime.batch_barrier import current_participant
from kapelle.runtime.credentials import bearer
from kapelle.runtime.deadlines import pause_all_deadlines
from kapelle.runtime.http import MAX_BYTES, Answer, exchange
from kapelle.settings.base import FREE, FROM_HERE_ON, Address
from kapelle.types import Json, Split, Task

PAUSES = (0.2, 1.0, 3.0)
"""Seconds between attempts to open a session; one that is open is never replaced, because the server's world is in it."""


HANGS_UP = 2.0
"""Seconds that a server has to end a session that is over."""


class OpenEnv(Endless, StatedRewards, WithTeacher, Alive, AsksServers, Described, Holding, OneSeat):
    """An environment on an OpenEnv server; an agent's text becomes its action, and each step pays at once."""

    name: Literal["openenv"] = "openenv"
    url: Annotated[Address, FROM_HERE_ON]
    """Address of the server, such as `http://127.0.0.1:8000`."""
    action: str | None = None
    """Field of the action that holds the agent's text; null finds it in the server's schema, where only one can be meant.
    Otherwise agents write the whole action as a JSON object."""
    observation: str | None = None
    """Field of the observation that agents read; null shows all of them."""
    arguments: Mapping[str, Json] = Field(default={})
    """Further arguments of `reset`."""
    max_steps: int = Field(default=50, ge=1)
    """Steps after which an episode is cut short."""
    max_characters: int = Field(default=8000, ge=100)
    """Most characters of an observation that an agent reads."""
    sessions: Annotated[int, FREE] = Field(default=1, ge=1)
    """Episodes that the server plays at once; further ones wait. A server of openenv-core allows one unless it says otherwise."""
    transport: Literal["websocket", "http"] = "websocket"
    """`http` for a server that keeps its environment between plain calls: one episode at a time."""
    attempt_s: Annotated[float, Field(gt=0.0), FREE] = 60.0
    """Seconds within which the server answers a message."""
    token_env: Annotated[str, FREE] = "OPENENV_TOKEN"  # noqa: S105 - the name of a variable
    """Environment variable that holds the server's token, sent as a bearer's; the token itself is never stored."""

    @property
    def offered(self) -> frozenset[type]:
        """Demonstrations, where a `teacher` gives them."""
        return frozenset() if self.teacher is None else frozenset({Scripted})

    @property
    def sources(self) -> Mapping[Split, str]:
        """The server; even seeds are for training, odd ones for tests."""
        return {"train": f"episodes of {self.url}, even seeds", "test": f"episodes of {self.url}, odd seeds"}

    @property
    def alive(self) -> Sequence[str]:
        """The server."""
        return (f"`url` ({self.url})",)

    def servers(self) -> Sequence[AskedServer]:
        """The server."""
        return (AskedServer("The OpenEnv server", self.url, f"{self._base}/health", self.token_env),)

    def descriptors(self, agents: int) -> int:
        """Return the connection of a session."""
        return 1

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError for a missing package, and a token that others on the network could read."""
        if self.transport == "websocket" and find_spec("websockets") is None:
            raise AbsentPackage(
                "The environment `openenv` needs the package websockets, which is not installed. Install it with "
                "`pip install 'kapelle[openenv]'`, or set `environment.transport: http`."
            )
        self.check_teacher()
        bearer(self.token_env, self.url)

    def task(self, split: Split, index: int) -> Task:
        """Return an episode by its seed: all episodes of a group get the same."""
        return Task(f"{split}-{index}", "", {"seed": 2 * index + (split == "test")})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> OpenEnvWorld:
        """Prepare an episode; its session is opened by `reset`."""
        return OpenEnvWorld(task, agents, self)

    @property
    def _base(self) -> str:
        return self.url.rstrip("/")

    @property
    def headers(self) -> Mapping[str, str]:
        """The header with the token, where there is one."""
        return bearer(self.token_env, self.url)

    async def call(self, method: str, path: str, body: Json = None) -> Answer:
        """Return the server's answer to a plain call; EpisodeError where there is none."""
        import httpx

        try:
            return await exchange(method, f"{self._base}{path}", body, self.headers, self.attempt_s)
        except httpx.HTTPError as error:
            raise EpisodeError(
                f"The OpenEnv server at {self.url} is not there ({path}): {str(error) or type(error).__name__}"
            ) from None

    async def fetch(self, method: str, path: str, body: Json = None) -> Any:
        """Return what the server answers to a plain call, as JSON; EpisodeError for an error or nonsense."""
        answer = await self.call(method, path, body)
        if answer.status != 200:
            said = answer.body[:200].decode("utf-8", "replace")
            raise EpisodeError(f"The OpenEnv server answers {path} with status {answer.status}: {said}")
        return read_json(answer.body)


def read_json(text: str | bytes) -> Any:
    """Return JSON of a server; EpisodeError for anything else."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise EpisodeError(f"The OpenEnv server answers {text[:60]!r}, which is no JSON.") from None


# -------- What an agent's text becomes


class ActionForm(NamedTuple):
    """How an agent's text becomes an action."""

    field: str | None
    """Where the text goes; None where the agent writes the whole action as a JSON object."""
    kind: str
    """JSON type of the field: `string`, `integer`, …"""
    told: str
    """What agents read about it before their first move; empty for a text."""


def action_form(schema: Any, wanted: str | None) -> ActionForm:
    """Return how texts become actions of a schema; EpisodeError for a field that it does not have."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        raise EpisodeError("The OpenEnv server's schema of an action has no properties.")
    own = {
        name: part for name, part in properties.items() if name != "metadata" and isinstance(part, Mapping)
    }
    if wanted is not None and wanted not in own:
        raise EpisodeError(
            f"`environment.action` is '{wanted}', which the server's action does not have.{did_you_mean(wanted, own)}"
        )
    required = [name for name in schema.get("required") or () if name in own]
    texts = [name for name, part in own.items() if part.get("type") == "string"]
    candidates = [wanted] if wanted else required or list(own)
    if len(candidates) > 1 and not required and len(texts) == 1:
        candidates = texts
    if len(candidates) == 1:
        field = candidates[0]
        kind = str(own[field].get("type", "string"))
        if kind in {"string", "integer", "number", "boolean"}:
            hint = "" if kind == "string" else f"Answer with {_KINDS[kind]} alone."
            return ActionForm(field, kind, hint)
    shown = json.dumps({"properties": own, "required": required}, ensure_ascii=False)
    return ActionForm(
        None, "object", f"Answer with an action and nothing else, as a JSON object of this schema:\n{shown}"
    )


_KINDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
_OBJECT = re.compile(r"\{.*\}", re.DOTALL)


def to_action(text: str, form: ActionForm) -> Json | None:
    """Return the action of a text; None where it holds none, which is the agent's fault."""
    if form.kind == "string" and form.field is not None:
        return {form.field: text}
    found = _OBJECT.search(text) if form.field is None else None
    try:
        value = json.loads(
            found[0] if found else text.strip().lower() if form.kind == "boolean" else text.strip()
        )
        json.dumps(value, allow_nan=False)  # Python reads NaN and 1e999, which are no JSON
    except (ValueError, RecursionError):
        return None
    if form.field is None:
        return value if isinstance(value, dict) else None
    fits = {
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "boolean": isinstance(value, bool),
    }
    return {form.field: value} if fits[form.kind] else None


# -------- Sessions: one environment of the server, for one episode


class RefusedAction(Exception):
    """The server refused an action; its text is what the agent reads."""


class SocketSession:
    """An environment of the server over a WebSocket."""

    def __init__(self, settings: OpenEnv) -> None:
        self._settings = settings
        self._socket: Any = None

    async def open(self) -> None:
        """Connect; EpisodeError where no attempt succeeds."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        address = re.sub(r"^http", "ws", self._settings.url.rstrip("/")) + "/ws"
        for pause in (*PAUSES, None):
            try:
                self._socket = await connect(
                    address,
                    additional_headers=dict(self._settings.headers),
                    open_timeout=self._settings.attempt_s,
                    max_size=MAX_BYTES,
                    close_timeout=HANGS_UP,
                    proxy=None,
                )
            except (OSError, TimeoutError, WebSocketException) as error:
                if pause is None:
                    raise EpisodeError(f"No session of the OpenEnv server at {address}: {error}") from None
                await asyncio.sleep(pause)
            else:
                return

    async def ask(self, message: Mapping[str, Json]) -> Any:
        """Return the data of the server's answer; RefusedAction for an action that does not fit, EpisodeError otherwise."""
        from websockets.exceptions import WebSocketException

        kind = message["type"]
        try:
            await self._socket.send(json.dumps(message))
            async with asyncio.timeout(self._settings.attempt_s):
                said = read_json(await self._socket.recv())
        except TimeoutError:
            raise EpisodeError(
                f"The OpenEnv server did not answer `{kind}` within {self._settings.attempt_s:g} s (`environment.attempt_s`)."
            ) from None
        except (OSError, WebSocketException) as error:
            raise EpisodeError(f"The OpenEnv server is gone: {error}") from None
        data = said.get("data") if isinstance(said, Mapping) else None
        if not isinstance(data, Mapping):
            raise EpisodeError(f"The OpenEnv server answers `{kind}` with {said!r:.80}.")
        if said.get("type") == "error":
            told = f"{data.get('message', 'no message')}"[:500]
            if data.get("code") == "VALIDATION_ERROR" and kind == "step":
                raise RefusedAction(f"{told} {json.dumps(data.get('errors', ''))[:500]}")
            raise EpisodeError(
                f"The OpenEnv server answers `{kind}` with an error, {data.get('code')}: {told}"
            )
        return data

    async def close(self) -> None:
        """Leave the session; the server ends its environment."""
        if self._socket is not None:
            with suppress(Exception):
                await self._socket.send('{"type": "close"}')
                # The server hangs up itself then; where the client is faster, it logs a traceback for every episode.
                async with asyncio.timeout(HANGS_UP):
                    await self._socket.wait_closed()
            with suppress(Exception):
                await self._socket.close()


class PlainSession:
    """The one environment of a server that keeps it between plain calls."""

    def __init__(self, settings: OpenEnv) -> None:
        self._settings = settings

    async def open(self) -> None:
        """Do nothing: every call is a connection of its own."""

    async def ask(self, message: Mapping[str, Json]) -> Any:
        """Return the server's answer to one of `reset`, `step` and `state`; see `SocketSession.ask`."""
        kind, data = str(message["type"]), message.get("data")
        if kind == "state":
            said = await self._settings.fetch("GET", "/state")
        elif kind == "reset":
            said = await self._settings.fetch("POST", "/reset", data)
        else:
            answer = await self._settings.call("POST", "/step", {"action": data})
            if answer.status == 422:
                raise RefusedAction(answer.body[:500].decode("utf-8", "replace"))
            if answer.status != 200:
                raise EpisodeError(f"The OpenEnv server answers /step with status {answer.status}.")
            said = read_json(answer.body)
        if not isinstance(said, Mapping):
            raise EpisodeError(f"The OpenEnv server answers `{kind}` with {said!r:.80}.")
        return said

    async def close(self) -> None:
        """Do nothing."""


_open: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], asyncio.Semaphore]] = (
    weakref.WeakKeyDictionary()
)
"""Sessions that may still be opened, by event loop and server."""


class OpenEnvWorld(BaseWorld, Resets):
    """One episode in a session of its own; any agent may take a move, the last one unless the workflow has another speak."""

    def __init__(self, task: Task, agents: Sequence[str], settings: OpenEnv) -> None:
        super().__init__(task, agents)
        self._settings = settings
        self._session = (
            SocketSession(settings) if settings.transport == "websocket" else PlainSession(settings)
        )
        self._turn: asyncio.Semaphore | None = None
        self._form = ActionForm(None, "object", "")
        self._reads = ""
        self._steps = self._faults = 0
        self._total = 0.0
        self._done = False
        self._state: dict[str, Json] = {}
        self._mover = self.agents[-1]

    async def reset(self) -> None:
        """Open a session, once the server has one to spare, and begin."""
        try:
            await self._begin()
        except BaseException:  # nobody closes a world that has not begun
            await self.close()
            raise

    async def _begin(self) -> None:
        settings = self._settings
        most = settings.sessions if settings.transport == "websocket" else 1
        turns = _open.setdefault(asyncio.get_running_loop(), {})
        turn = turns.setdefault((settings.url, most), asyncio.Semaphore(most))
        if turn.locked():
            part = current_participant()
            if part is not None:
                part.give_up()  # nobody waits for an episode that waits for others to end
        begins = pause_all_deadlines()
        try:
            await turn.acquire()
        finally:
            begins()
        self._turn = turn
        await self._session.open()
        schema = await settings.fetch("GET", "/schema")
        self._form = action_form(
            schema.get("action") if isinstance(schema, Mapping) else None, settings.action
        )
        seed: dict[str, Json] = {"seed": self.task.data["seed"]}
        self._take(await self._session.ask({"type": "reset", "data": {**seed, **settings.arguments}}))
        if self._form.told:
            self._reads = f"{self._form.told}\n\n{self._reads}".strip()

    def _take(self, said: Mapping[str, Any]) -> float:
        """Keep what an answer shows; return its reward. EpisodeError for one that is none."""
        seen, reward, done = said.get("observation"), said.get("reward"), said.get("done", False)
        if not isinstance(seen, Mapping) or not isinstance(done, bool):
            raise EpisodeError(
                f"The OpenEnv server answers {str(dict(said))[:80]!r}: an observation and `done` are missing."
            )
        if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise EpisodeError(f"The OpenEnv server pays {reward!r:.40}, which is no finite number.")
        field = self._settings.observation
        if field is not None and field not in seen:
            raise EpisodeError(
                f"`environment.observation` is '{field}', which the server's observation does not have.{did_you_mean(field, seen)}"
            )
        shown = {field: seen[field]} if field is not None else seen
        parts = {str(name): part for name, part in shown.items() if part not in (None, "", [], {})}
        lines = [
            part if len(parts) == 1 and isinstance(part, str) else f"{name}: {_written(part)}"
            for name, part in parts.items()
        ]
        text, most = "\n".join(lines), self._settings.max_characters
        self._reads = (
            text if len(text) <= most else f"{text[:most]}\n… ({len(text) - most:,} more characters)"
        )
        self._done = done
        return float(reward or 0.0)

    def observe(self, agent: str) -> str:
        """Return what the server has shown last."""
        return self._reads

    def movers(self) -> tuple[str, ...]:
        """Return the agent in the seat, the last one, until the episode is over or all steps are used."""
        return () if self._done or self._steps >= self._settings.max_steps else (self._mover,)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Act by `final` or the one text that was said, and pay; what is no action is said to the agent, and costs a step."""
        if not self.movers():
            raise EpisodeError("The episode is over.")
        need_seats(actions, self.agents)
        if len(actions) != 1 and final is None:
            raise EpisodeError(
                f"This world has one seat, and {len(actions)} agents spoke. Let a workflow name the text that counts."
            )
        self._mover = [*actions][-1]
        self._steps += 1
        action = to_action(actions[self._mover] if final is None else final, self._form)
        if action is None:
            self._faults += 1
            self._reads = f"Error: this is no action. {self._form.told}"
            return {}
        try:
            reward = self._take(await self._session.ask({"type": "step", "data": action}))
        except RefusedAction as refused:
            self._faults += 1
            self._reads = f"Error: {refused}"
            return {}
        self._total += reward
        if not self.movers():
            said = await self._session.ask({"type": "state"})
            self._state = {
                str(name): value
                for name, value in said.items()
                if value is None
                or isinstance(value, bool | int)
                or (isinstance(value, float) and math.isfinite(value))
            }
        return {self._mover: reward}

    def outcome(self) -> Outcome:
        """Return how it ended; what was paid stands on the turns."""
        info: dict[str, Json] = {
            "total": self._total,
            "steps": self._steps,
            "no_actions": self._faults,
            "state": self._state,
        }
        return Outcome({self._mover: 0.0}, None, info, truncated=not self._done)

    async def close(self) -> None:
        """Leave the session, so that another episode can have it."""
        try:
            await self._session.close()
        finally:
            if self._turn is not None:
                self._turn.release()
                self._turn = None


def _written(part: object) -> str:
    return part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
