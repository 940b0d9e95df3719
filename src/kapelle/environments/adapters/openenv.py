"""Adapter for environments on a server that implements the OpenEnv protocol (openenv-core 0.2 and 0.3) with `reset`, `step` and `state`.

    environment: {name: openenv, url: "http://127.0.0.1:8000"}

Each episode opens its own session over a WebSocket, as the client of openenv-core does.

Responses of the server are limited in size and time, and rewards must be finite. If the server is unreachable or returns an invalid
response, the episode fails.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from kapelle.environment import (
    Described,
    ExternalServer,
    Outcome,
    Reporting,
    Resets,
    Scripted,
    TeamMoves,
    UsesServers,
)
from kapelle.environments.adapters.plain import need_package, one_text
from kapelle.environments.base import BaseState, Endless, StatedRewards
from kapelle.environments.taught import WithTeacher
from kapelle.errors import EpisodeError, did_you_mean
from kapelle.runtime.batch_barrier import current_participant
from kapelle.runtime.credentials import bearer
from kapelle.runtime.deadlines import pause_deadline
from kapelle.runtime.http import MAX_BYTES, exchange
from kapelle.settings.base import FREE, FROM_HERE_ON, Address
from kapelle.types import Json, Split, Task

PAUSES = (0.2, 1.0, 3.0)
"""Waiting times in seconds between attempts to open a session. A session that is lost after opening is not replaced, because it holds
the episode's state."""

CLOSING_SECONDS = 2.0
"""Maximum time in seconds for the server to close a finished session."""


class OpenEnv(Endless, StatedRewards, WithTeacher, Reporting, UsesServers, Described, TeamMoves):
    """An environment on an OpenEnv server. An agent's text is converted to an action, and each step has a reward."""

    name: Literal["openenv"] = "openenv"
    url: Annotated[Address, FROM_HERE_ON]
    """The URL of the server, such as `http://127.0.0.1:8000`."""
    action: str | None = None
    """The field of the action that receives the agent's text. If null, the field is chosen from the server's schema; if several fields
    are possible, agents write the whole action as a JSON object."""
    observation: str | None = None
    """The field of the observation that agents read. If null, agents read all fields."""
    arguments: Mapping[str, Json] = Field(default={})
    """Additional arguments for `reset`."""
    max_steps: int = Field(default=50, ge=1)
    """The maximum number of steps per episode."""
    max_characters: int = Field(default=8000, ge=100)
    """The maximum number of characters of an observation that is shown to an agent."""
    sessions: Annotated[int, FREE] = Field(default=1, ge=1)
    """The number of episodes that the server runs at the same time. Further episodes wait for a free session. The default of servers
    built with openenv-core is 1."""
    attempt_s: Annotated[float, Field(gt=0.0), FREE] = 60.0
    """Maximum time in seconds for the server to respond to a message."""
    token_env: Annotated[str, FREE] = "OPENENV_TOKEN"  # noqa: S105 - the name of a variable
    """The name of the environment variable that holds the server's bearer token. The token itself is never stored."""

    @property
    def offered(self) -> frozenset[type]:
        """The additional capabilities of this environment. If a `teacher` is set, the environment is also `Scripted`."""
        return frozenset() if self.teacher is None else frozenset({Scripted})

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the train and test episodes. Training uses even seeds, and tests use odd seeds."""
        return {"train": f"episodes of {self.url}, even seeds", "test": f"episodes of {self.url}, odd seeds"}

    @property
    def alive(self) -> Sequence[str]:
        """The OpenEnv server, whose responses may vary."""
        return (f"`url` ({self.url})",)

    def servers(self) -> Sequence[ExternalServer]:
        """Return the OpenEnv server, so that it can be tested before the models are loaded."""
        return (
            ExternalServer("The OpenEnv server", self.url, f"{self.url.rstrip('/')}/health", self.token_env),
        )

    def descriptors(self, agents: int) -> int:
        """Return 1, because each episode holds one connection open."""
        return 1

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if the package is missing or a token would be sent without encryption."""
        need_package("openenv", "websockets", "'kapelle[openenv]'")
        self.check_teacher()
        bearer(self.token_env, self.url)

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index. The task contains a seed that all episodes of a group share."""
        return Task(f"{split}-{index}", "", {"seed": 2 * index + (split == "test")})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> OpenEnvState:
        """Return the state of a new episode. The session is opened later, in `reset`."""
        return OpenEnvState(task, agents, self)

    @property
    def headers(self) -> Mapping[str, str]:
        """The HTTP header that contains the bearer token, or an empty mapping if there is no token."""
        return bearer(self.token_env, self.url)

    async def server_schema(self) -> Any:
        """Return the schemas that the server reports. Raises EpisodeError if the request fails."""
        import httpx

        try:
            answer = await exchange(
                "GET", f"{self.url.rstrip('/')}/schema", None, self.headers, self.attempt_s
            )
        except httpx.HTTPError as error:
            raise EpisodeError(
                f"The OpenEnv server at {self.url} is unreachable: {str(error) or type(error).__name__}"
            ) from None
        if answer.status != 200:
            raise EpisodeError(f"The OpenEnv server answered /schema with status {answer.status}.")
        return read_json(answer.body)


def read_json(text: str | bytes) -> Any:
    """Parse JSON that a server sent. Raises EpisodeError if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise EpisodeError(f"The OpenEnv server returned {text[:60]!r}, which is not JSON.") from None


# -------- From an agent's text to an action


class ActionForm(NamedTuple):
    """Describes how an agent's text is converted to an action."""

    field: str | None
    """The field of the action that receives the text, or None if the agent writes the whole action as a JSON object."""
    kind: str
    """The JSON type of the field or action, such as `string` or `integer`."""
    hint: str
    """The instruction that the agent reads before its first move, or an empty string if the action is a string."""


_HINTS = {
    "string": "",
    "integer": "Answer with a whole number alone.",
    "number": "Answer with a number alone.",
    "boolean": "Answer with true or false alone.",
}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
}
_OBJECT = re.compile(r"\{.*\}", re.DOTALL)


def action_form(schema: Any, wanted: str | None) -> ActionForm:
    """Return how a text is converted to an action of this schema. Raises EpisodeError if the schema lacks the field `wanted`."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        raise EpisodeError("The OpenEnv server's action schema has no properties.")
    fields = {
        name: part for name, part in properties.items() if name != "metadata" and isinstance(part, Mapping)
    }
    if wanted is not None and wanted not in fields:
        raise EpisodeError(
            f"`environment.action` is '{wanted}', but the server's action has no such field.{did_you_mean(wanted, fields)}"
        )
    required = [name for name in schema.get("required") or () if name in fields]
    texts = [name for name, part in fields.items() if part.get("type") == "string"]
    candidates = [wanted] if wanted else required or list(fields)
    if len(candidates) > 1 and not required and len(texts) == 1:
        candidates = texts
    if len(candidates) == 1:
        kind = str(fields[candidates[0]].get("type", "string"))
        if kind in _HINTS:
            return ActionForm(candidates[0], kind, _HINTS[kind])
    shown = json.dumps({"properties": fields, "required": required}, ensure_ascii=False)
    return ActionForm(
        None, "object", f"Answer with an action and nothing else, as a JSON object of this schema:\n{shown}"
    )


def to_action(text: str, form: ActionForm) -> Json | None:
    """Return the action that an agent's text describes, or None if the text is not a valid action."""
    if form.kind == "string" and form.field is not None:
        return {form.field: text}
    written = text.strip().lower() if form.kind == "boolean" else text.strip()
    if form.field is None and (found := _OBJECT.search(text)):
        written = found[0]
    try:
        value = json.loads(written)
        json.dumps(value, allow_nan=False)  # Python parses NaN and 1e999, which are not valid JSON
    except (ValueError, RecursionError):
        return None
    if type(value) not in _TYPES[form.kind]:
        return None
    return value if form.field is None else {form.field: value}


# -------- Sessions


class ActionRejected(Exception):
    """Raised if the agent's text is not an action or the server rejects the action. The agent reads the message."""


class OpenEnvSession:
    """A session with one environment on the server. Each episode has its own session."""

    def __init__(self, settings: OpenEnv) -> None:
        self._settings = settings
        self._socket: Any = None

    async def open(self) -> None:
        """Connect to the server. Raises EpisodeError if all attempts fail."""
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
                    close_timeout=CLOSING_SECONDS,
                    proxy=None,
                )
            except (OSError, TimeoutError, WebSocketException) as error:
                if pause is None:
                    raise EpisodeError(
                        f"Cannot open a session on the OpenEnv server at {address}: {error}"
                    ) from None
                await asyncio.sleep(pause)
            else:
                return

    async def request(self, kind: str, data: Json = None) -> Any:
        """Send a message and return the data of the server's response.

        Raises ActionRejected for an invalid action and EpisodeError for any other failure.
        """
        from websockets.exceptions import WebSocketException

        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            await self._socket.send(json.dumps(message))
            async with asyncio.timeout(self._settings.attempt_s):
                answer = read_json(await self._socket.recv())
        except TimeoutError:
            raise EpisodeError(
                f"The OpenEnv server did not answer `{kind}` within {self._settings.attempt_s:g} s (`environment.attempt_s`)."
            ) from None
        except (OSError, WebSocketException) as error:
            raise EpisodeError(f"The OpenEnv server closed the session: {error}") from None
        found = answer.get("data") if isinstance(answer, Mapping) else None
        if not isinstance(found, Mapping):
            raise EpisodeError(f"The OpenEnv server answered `{kind}` with {answer!r:.80}.")
        if answer.get("type") == "error":
            shown = f"{found.get('message', 'no message')}"[:500]
            if found.get("code") == "VALIDATION_ERROR" and kind == "step":
                raise ActionRejected(f"{shown} {json.dumps(found.get('errors', ''))[:500]}")
            raise EpisodeError(f"The OpenEnv server answered `{kind}` with {found.get('code')}: {shown}")
        return found

    async def close(self) -> None:
        """Close the session, which ends its environment on the server."""
        if self._socket is not None:
            with suppress(Exception):
                await self._socket.send('{"type": "close"}')
                # Let the server close the connection first; otherwise it logs a traceback for every episode.
                async with asyncio.timeout(CLOSING_SECONDS):
                    await self._socket.wait_closed()
            with suppress(Exception):
                await self._socket.close()


_free_sessions: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[tuple[str, int], asyncio.Semaphore]
] = weakref.WeakKeyDictionary()
"""Semaphores that limit the number of open sessions, for each event loop and for each server URL and session limit."""


class OpenEnvState(BaseState, Resets):
    """The state of one episode. Any agent may move. If the workflow does not name an agent, the agent that moved last moves again."""

    def __init__(self, task: Task, agents: Sequence[str], settings: OpenEnv) -> None:
        super().__init__(task, agents)
        self._settings = settings
        self._session = OpenEnvSession(settings)
        self._free: asyncio.Semaphore | None = None
        self._form = ActionForm(None, "object", "")
        self._observation = ""
        self._steps = self._faults = 0
        self._total = 0.0
        self._done = False
        self._state: dict[str, Json] = {}
        self._mover = self.agents[-1]

    async def reset(self) -> None:
        """Wait until the server has a free session, open the session and reset the environment."""
        try:
            await self._begin()
        except BaseException:  # if an episode fails to begin, nothing else closes it
            await self.close()
            raise

    async def _begin(self) -> None:
        settings = self._settings
        free = _free_sessions.setdefault(asyncio.get_running_loop(), {})
        semaphore = free.setdefault((settings.url, settings.sessions), asyncio.Semaphore(settings.sessions))
        participant = current_participant()
        if semaphore.locked() and participant is not None:
            participant.give_up()  # an episode that waits for other episodes must not delay their batch
        resume_deadlines = pause_deadline(outer_too=True)
        try:
            await semaphore.acquire()
        finally:
            resume_deadlines()
        self._free = semaphore
        await self._session.open()
        schema = await settings.server_schema()
        self._form = action_form(
            schema.get("action") if isinstance(schema, Mapping) else None, settings.action
        )
        seed: dict[str, Json] = {"seed": self.task.data["seed"]}
        self._receive(await self._session.request("reset", {**seed, **settings.arguments}))
        if self._form.hint:
            self._observation = f"{self._form.hint}\n\n{self._observation}".strip()

    def _receive(self, answer: Mapping[str, Any]) -> float:
        """Store the observation of a response and return the reward. Raises EpisodeError if the response is invalid."""
        seen, reward, done = answer.get("observation"), answer.get("reward"), answer.get("done", False)
        if not isinstance(seen, Mapping) or not isinstance(done, bool):
            raise EpisodeError(
                f"The OpenEnv server returned {str(dict(answer))[:80]!r}, without an observation or a boolean `done`."
            )
        if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise EpisodeError(
                f"The OpenEnv server's reward is {reward!r:.40}, which is not a finite number."
            )
        field = self._settings.observation
        if field is not None and field not in seen:
            raise EpisodeError(
                f"`environment.observation` is '{field}', but the server's observation has no such field.{did_you_mean(field, seen)}"
            )
        shown = {field: seen[field]} if field is not None else seen
        parts = {
            str(name): part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
            for name, part in shown.items()
            if part not in (None, "", [], {})
        }
        one_text = len(parts) == 1 and isinstance(shown[next(iter(parts))], str)
        text = "\n".join(part if one_text else f"{name}: {part}" for name, part in parts.items())
        most = self._settings.max_characters
        self._observation = (
            text if len(text) <= most else f"{text[:most]}\n… ({len(text) - most:,} more characters)"
        )
        self._done = done
        return float(reward or 0.0)

    def observe(self, agent: str) -> str:
        """Return the last observation that the server sent."""
        return self._observation

    def movers(self) -> tuple[str, ...]:
        """Return the agent that moves, or an empty tuple if the episode is done or has reached the maximum number of steps."""
        return () if self._done or self._steps >= self._settings.max_steps else (self._mover,)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Send the action in `final`, or in the only text, to the server and return the reward.

        An invalid action counts as a step, and the agent reads an error message.
        """
        if not self.movers():
            raise EpisodeError("The episode is over.")
        self._mover, text = one_text(actions, self.agents, final)
        self._steps += 1
        action = to_action(text, self._form)
        try:
            if action is None:
                raise ActionRejected(f"this is not an action. {self._form.hint}")
            reward = self._receive(await self._session.request("step", action))
        except ActionRejected as rejected:
            self._faults += 1
            self._observation = f"Error: {rejected}"
            return {}
        self._total += reward
        if not self.movers():
            state = await self._session.request("state")
            self._state = {
                str(name): value
                for name, value in state.items()
                if value is None
                or isinstance(value, bool | int)
                or (isinstance(value, float) and math.isfinite(value))
            }
        return {self._mover: reward}

    def outcome(self) -> Outcome:
        """Return the outcome of the episode with rewards of 0, because all rewards were given after the individual steps."""
        info: dict[str, Json] = {
            "total": self._total,
            "steps": self._steps,
            "no_actions": self._faults,
            "state": self._state,
        }
        return Outcome({self._mover: 0.0}, None, info, truncated=not self._done)

    async def close(self) -> None:
        """Close the session and let another episode open a session."""
        try:
            await self._session.close()
        finally:
            if self._free is not None:
                self._free.release()
                self._free = None
