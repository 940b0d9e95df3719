"""The requests of callers of an environment server: what each contains, read strictly, and its answer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
from pydantic import Field

from kapelle.environment import Answerable, Environment, Recorded, RemoteWorld, Scripted, offers, task_of
from kapelle.errors import KapelleError
from kapelle.rollout.bounded_worlds import BoundedWorld, open_world
from kapelle.rollout.workers.session import OpenSessions, WorkerSession
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.wire.worlds import VERSION, message_from, task_form, task_from
from kapelle.services.binding import TOKEN
from kapelle.services.environments.host import EnvironmentHost, ShelvedEnvironment, leaving
from kapelle.services.refusals import Body, Refusal, busy, wrong
from kapelle.setup.environment_forms import environment_from
from kapelle.types import Split, Task

C = TypeVar("C")
T = TypeVar("T")
Agents = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=256)]
Whole = Annotated[int, Field(ge=0, lt=1 << 63)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=True)]
MessageForm = Annotated[tuple[str, str, str | None, str | None], Field(strict=False)]
"""See `wire.worlds.message_form`."""


class TaskForm(Body):
    """See `wire.worlds.task_form`."""

    id: str
    question: str = ""
    data: dict[Any, Any] = Field(default={})
    part: str = ""
    cast: dict[str, Annotated[tuple[str, str], Field(strict=False)]] = Field(default={})
    system: str = ""
    messages: list[list[MessageForm]] = Field(default=[])
    rendered: bool = False

    def task(self) -> Task:
        """Return the task."""
        return task_from({name: getattr(self, name) for name in TaskForm.model_fields})


class WorldRequest(Body, ABC):
    """What a caller sends, without its `id`; see `REQUESTS`."""

    @abstractmethod
    async def answer(self, host: EnvironmentHost, sessions: OpenSessions) -> Any:
        """Return the answer as plain values; `sessions` are the caller's. Raises Refusal or Raised."""


# -------- About environments


class ListEnvironments(WorldRequest):
    """What the server holds."""

    async def answer(self, host: EnvironmentHost, sessions: OpenSessions) -> Any:
        """See `WorldRequest`."""
        held = [asdict(each.description) for each in host.shelf.held.values()]
        return {"protocol": VERSION, "software": version("kapelle"), "environments": held}


class Describe(WorldRequest):
    """What one environment is; an empty name means the only one."""

    environment: str = ""

    async def answer(self, host: EnvironmentHost, sessions: OpenSessions) -> Any:
        """See `WorldRequest`."""
        return asdict(host.shelf.find(self.environment).description)

    async def _now(self, host: EnvironmentHost, method: str, work: Callable[[Environment], T]) -> T:
        environment = host.shelf.find(self.environment).environment
        return await host.now(environment.name, method, lambda: work(environment))

    def _offering(self, host: EnvironmentHost, capability: type[C], what: str) -> C:
        environment = host.shelf.find(self.environment).environment
        if not offers(environment, capability):
            raise wrong(f"This environment has no {what}.")
        return environment


class Check(Describe):
    """Whether agents of these names can play it."""

    agents: Agents

    async def answer(self, host: EnvironmentHost, sessions: OpenSessions) -> Any:
        """See `WorldRequest`."""
        await self._now(host, "check", lambda environment: environment.check(_distinct(self.agents)))


class GetTask(Describe):
    """One of its tasks: the same for the same split and index, whenever it is requested."""

    split: Split
    index: Whole

    async def answer(self, host: EnvironmentHost, sessions: OpenSessions) -> Any:
        """See `WorldRequest`."""
        held = host.shelf.find(self.environment)
        return task_form(await _pick(host, held, self.split, self.index))


class Extract(Describe):
    """The final answer of a text in a normal form."""

    text: str

    async def answer(self, host: EnvironmentHost, sessions: OpenSessions) -> Any:
        """See `WorldRequest`."""
        answerable = self._offering(host, Answerable, "answers to compare")
        return await self._now(host, "extract", lambda _: answerable.extract(self.text))


class Script(Describe):
    """The text of the scripted expert."""

    agent: str
    task: TaskForm
    messages: list[MessageForm]
    seed: Seed

    async def answer(self, host: EnvironmentHost, sessions: OpenSessions) -> Any:
        """See `WorldRequest`."""
        scripted, task = self._offering(host, Scripted, "script"), self.task.task()
        messages = [message_from(each) for each in self.messages]
        return await self._now(
            host, "script", lambda _: scripted.script(self.agent, task, messages, self.seed)
        )


class RecordedText(Describe):
    """What a recorded agent wrote in a turn, in one of the task's records."""

    agent: str
    task: TaskForm
    turn: Whole
    sample: Whole

    async def answer(self, host: EnvironmentHost, sessions: OpenSessions) -> Any:
        """See `WorldRequest`."""
        record, task = self._offering(host, Recorded, "recorded answers"), self.task.task()
        text = await self._now(
            host, "recorded", lambda _: record.recorded(self.agent, task, self.turn, self.sample)
        )
        return text if isinstance(text, str) else text.content


class Register(WorldRequest):
    """Add an environment, or replace the one of that name; only with a token, because it decides which code runs."""

    name: str = Field(min_length=1, max_length=128)
    settings: dict[str, Any]
    """As a recipe has them."""

    async def answer(self, host: EnvironmentHost, sessions: OpenSessions) -> Any:
        """See `WorldRequest`."""
        if not host.guarded:
            raise Refusal(
                403,
                f"This server requires no token, so what it runs cannot be changed. Start it with {TOKEN} set.",
            )
        kind = self.settings.get("name")
        if not self.name.isprintable() or not isinstance(kind, str):
            raise wrong('`name` is printable, and `settings` is an environment: {"name": "arithmetic", …}.')
        form = {"class": kind, "settings": self.settings}

        async def put() -> ShelvedEnvironment:
            return host.shelf.put(self.name, environment_from(form))

        try:
            held = await host.worlds.ask(put)
        except pydantic.ValidationError as error:
            raise wrong(f"These are no settings of '{kind}': {error}") from None
        except KapelleError as error:
            raise wrong(str(error)) from None
        # The processes of what no session plays any more.
        played = [session.environment for session in host.sessions]
        for old in host.shelf.replaced:
            if old.workers is not None and not any(each is old.environment for each in played):
                await asyncio.to_thread(old.workers.close)
        return asdict(held.description)


def _distinct(names: list[str]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise wrong("`agents` names one twice.", "agents")
    return tuple(names)


async def _pick(host: EnvironmentHost, held: ShelvedEnvironment, split: Split, index: int) -> Task:
    size = held.description.sizes[split]
    if size is not None and index >= size:
        raise Refusal(416, f"Split '{split}' has {size} tasks, and none {index}.", "index")
    environment = held.environment
    return await host.now(environment.name, "task", lambda: task_of(environment, split, index))


# -------- About sessions


class AboutSession(WorldRequest):
    """A request that an open session answers; see `rollout/workers/session.py`."""

    call: ClassVar[str]
    session: Whole

    async def answer(self, host: EnvironmentHost, sessions: OpenSessions) -> Any:
        """See `WorldRequest`."""
        self._world(sessions)
        return await sessions.answer(self.session, {"call": self.call, **self.model_dump()})

    def _world(self, sessions: OpenSessions) -> BoundedWorld | RemoteWorld:
        session = sessions.open.get(self.session)
        if session is None or not session.begun:
            message = "There is no such session: it was closed, or its `reset` has not been answered."
            raise Refusal(404, message, "session")
        return session.world


class Reset(Describe):
    """Open a session: the world of one episode of a `task`, or of the task of a split and index."""

    session: Whole
    agents: Agents
    seed: Seed = 0
    task: TaskForm | None = None
    split: Split = "train"
    index: Whole | None = None
    call_seconds: Seconds | None = None
    grader_seconds: Seconds = Patience.grader

    async def answer(self, host: EnvironmentHost, sessions: OpenSessions) -> Any:
        """See `WorldRequest`."""
        held, agents = host.shelf.find(self.environment), _distinct(self.agents)
        if (self.task is None) is (self.index is None):
            raise wrong("Name what is played: a `task`, or a `split` and an `index`.")
        if self.task is not None:
            task = self.task.task()
        else:
            task = await _pick(host, held, self.split, self.index or 0)
        if host.leaving:
            raise leaving()
        if self.session in sessions.open:
            raise wrong("`session` is open already. Choose another number.", "session")
        if len(host.sessions) >= host.limits.sessions:
            raise busy(
                f"{host.limits.sessions:,} sessions are open, the most there may be. Reset again later."
            )
        most = host.limits.call_seconds
        patience = replace(
            Patience(),
            environment=min(self.call_seconds or most, most),
            grader=min(self.grader_seconds, Patience.grader),
        )
        opens = open_world if held.workers is None else held.workers.open_world
        session = WorkerSession(opens, held.environment, patience, agents)
        began = await sessions.begin(self.session, session, task, self.seed)
        return {**began, "version": held.description.version}


class Act(AboutSession):
    """Let agents move, all of them at once if several may."""

    call = "act"
    actions: dict[str, str]
    final: str | None = None
    allow_answers: Whole | None = None


class Observe(AboutSession):
    """Who may move, and what every agent sees now."""

    call = "observe"


class ScoreText(AboutSession):
    """What a text would earn as an agent's answer; the world stays as it is."""

    call = "score"
    agent: str
    text: str

    async def answer(self, host: EnvironmentHost, sessions: OpenSessions) -> Any:
        """See `WorldRequest`."""
        if not self._world(sessions).scorable:
            raise wrong("This world cannot score a text before the episode is over.")
        return await super().answer(host, sessions)


class GetOutcome(AboutSession):
    """How the episode ended."""

    call = "outcome"


class Close(AboutSession):
    """Free the session, whatever it is doing."""

    call = "close"

    async def answer(self, host: EnvironmentHost, sessions: OpenSessions) -> Any:
        """See `WorldRequest`."""
        await sessions.answer(self.session, {"call": self.call})


REQUESTS: Mapping[str, type[WorldRequest]] = {
    "list": ListEnvironments,
    "describe": Describe,
    "check": Check,
    "task": GetTask,
    "extract": Extract,
    "script": Script,
    "recorded": RecordedText,
    "register": Register,
    "reset": Reset,
    "act": Act,
    "observe": Observe,
    "score": ScoreText,
    "outcome": GetOutcome,
    "close": Close,
}
