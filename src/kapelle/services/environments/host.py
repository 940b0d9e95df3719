"""Holds the environments of a server and responds to requests about them and their episodes (see `wire/worlds.py`)."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from threading import Lock
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import Field

from kapelle.environment import (
    Answerable,
    Environment,
    Mixed,
    Reads,
    Recorded,
    Scripted,
    WorkerLost,
    has_comparable_answers,
    offers,
    report_of,
    task_of,
)
from kapelle.errors import KapelleError, did_you_mean
from kapelle.rollout.bounded_states import open_state
from kapelle.rollout.workers.pool import EnvironmentWorkers
from kapelle.rollout.workers.session import OpenSessions, WorkerSession, error_form
from kapelle.runtime.deadlines import Patience, call
from kapelle.runtime.event_loop import LoopThread
from kapelle.runtime.wire.worlds import VERSION, Description, message_from, task_form, task_from
from kapelle.services.binding import TOKEN
from kapelle.services.request_errors import Body, RequestError, busy, read_body, wrong
from kapelle.settings.base import Settings
from kapelle.setup.environment_forms import environment_from
from kapelle.types import Split, Task

C = TypeVar("C")
T = TypeVar("T")

# -------- Environments by name, each with a version; open sessions keep the version with which they began

SPLITS: tuple[Split, ...] = ("train", "test")


@dataclass(frozen=True, slots=True)
class RegisteredEnvironment:
    """One version of an environment."""

    environment: Environment
    description: Description
    workers: EnvironmentWorkers | None
    """The processes that run the episodes of this version, or None if this process runs them."""


class EnvironmentRegistry:
    """A thread-safe registry of environments by name."""

    def __init__(
        self, environments: Mapping[str, Environment], processes: int = 0, call_seconds: float = 600.0
    ) -> None:
        """Register environments. Each environment has `processes` processes, and each call takes at most `call_seconds`.

        Raises any error from reading the data of the environments, and ConfigError for an environment that another
        process cannot build.
        """
        self._processes, self._patience = processes, Patience(environment=call_seconds)
        self._changing = Lock()
        self.current: Mapping[str, RegisteredEnvironment] = {}
        """The current version of each environment by name. A change replaces the whole mapping."""
        self.replaced: list[RegisteredEnvironment] = []
        """The earlier versions, which open sessions may still use."""
        for name, environment in environments.items():
            self.put(name, environment)

    def find(self, name: str) -> RegisteredEnvironment:
        """Return the environment with the given name.

        An empty name stands for the only environment. Raises RequestError for an unknown name.
        """
        current = self.current
        if not name and len(current) == 1:
            return next(iter(current.values()))
        if name not in current:
            message = f"This server has no environment '{name}'.{did_you_mean(name, list(current))}"
            raise RequestError(404, message, "environment", "not_found")
        return current[name]

    def put(self, name: str, environment: Environment) -> RegisteredEnvironment:
        """Add an environment, or replace the environment with this name.

        Raises RequestError if the new version lacks a feature on which runs rely: comparable answers or moves, a
        script, records, or test tasks.
        """
        with self._changing:
            old = self.current.get(name)
            new = describe(name, environment, 1 if old is None else old.description.version + 1)
            if old is not None:
                had = old.description
                if (
                    had.answerable is not new.answerable
                    or had.scripted > new.scripted
                    or bool(had.answers_per_task) > bool(new.answers_per_task)
                    or (had.sizes["test"] is not None and new.sizes["test"] is None)
                ):
                    raise wrong(
                        f"The new environment '{name}' lacks a feature of the one that it would replace. "
                        "Register it under another name."
                    )
                self.replaced.append(old)
            workers = None
            if self._processes:
                workers = EnvironmentWorkers(environment, self._processes, self._patience)
            registered = RegisteredEnvironment(environment, new, workers)
            self.current = {**self.current, name: registered}
            return registered

    def close(self) -> None:
        """Terminate the processes of all environments."""
        for each in (*self.current.values(), *self.replaced):
            if each.workers is not None:
                each.workers.close()


def describe(name: str, environment: Environment, version: int) -> Description:
    """Return the description of an environment. Raises any error from reading the data of the environment."""
    least, greatest = environment.reward_range
    members = environment.members if offers(environment, Mixed) else {}
    # Its content consists of the class, the settings except the time limit, and the files that it declares.
    settings = (
        environment.model_dump(mode="json", exclude={"timeout"}) if isinstance(environment, Settings) else {}
    )
    files = dict(environment.contents()) if isinstance(environment, Reads) else {}
    kind = type(environment)
    form = [kind.__module__, kind.__qualname__, settings, sorted(files.values())]
    content = hashlib.sha256(json.dumps(form, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return Description(
        name,
        version,
        content,
        environment.name,
        least,
        greatest,
        sources={split: environment.sources[split] for split in SPLITS},
        sizes={split: environment.size(split) for split in SPLITS},
        skipped=dict(report_of(environment).skipped()),
        answerable=offers(environment, Answerable) and has_comparable_answers(environment),
        scripted=offers(environment, Scripted),
        answers_per_task=environment.answers_per_task() if offers(environment, Recorded) else 0,
        constant_sum=report_of(environment).constant_sum,
        alive=list(report_of(environment).alive),
        members={part: describe(part, member, version) for part, member in members.items()},
    )


# -------- The requests of callers, by `call`; fields are validated strictly

Agents = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=256)]
Whole = Annotated[int, Field(ge=0, lt=1 << 63)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=True)]
MessageForm = Annotated[tuple[str, str, str | None, str | None], Field(strict=False)]
"""The JSON form of a message; see `wire.worlds.message_form`."""


class TaskForm(Body):
    """The JSON form of a task; see `wire.worlds.task_form`."""

    id: str
    question: str = ""
    data: dict[Any, Any] = Field(default={})
    part: str = ""
    cast: dict[str, Annotated[tuple[str, str], Field(strict=False)]] = Field(default={})
    system: str = ""
    messages: list[list[MessageForm]] = Field(default=[])
    rendered: bool = False

    def task(self) -> Task:
        """Convert the form to a task."""
        return task_from({name: getattr(self, name) for name in TaskForm.model_fields})


class ListEnvironments(Body):
    """A request for the descriptions of all environments."""


class Register(Body):
    """A request to add or replace an environment. This request requires a token, because it decides which code runs."""

    name: str = Field(min_length=1, max_length=128)
    settings: dict[str, Any]
    """The settings of the environment, as in a recipe."""


class EnvironmentRequest(Body):
    """A request about one environment. An empty name stands for the only environment."""

    environment: str = ""


class Check(EnvironmentRequest):
    """A request to check whether the environment supports agents with the given names."""

    agents: Agents


class GetTask(EnvironmentRequest):
    """A request for the task at an index."""

    split: Split
    index: Whole


class Extract(EnvironmentRequest):
    """A request for the final answer in a text, in normal form."""

    text: str


class Script(EnvironmentRequest):
    """A request for the completion of the scripted expert."""

    agent: str
    task: TaskForm
    messages: list[MessageForm]
    seed: Seed


class RecordedText(EnvironmentRequest):
    """A request for the completion of a recorded agent in a turn of one of the task's records."""

    agent: str
    task: TaskForm
    turn: Whole
    sample: Whole


class Reset(EnvironmentRequest):
    """A request to open a session, which is an episode of a given `task` or of the task at a split and index."""

    session: Whole
    agents: Agents
    seed: Seed = 0
    task: TaskForm | None = None
    split: Split = "train"
    index: Whole | None = None
    call_seconds: Seconds | None = None
    grader_seconds: Seconds = Patience.grader


class SessionRequest(Body):
    """A request about an open session; see `rollout/workers/session.py`."""

    session: Whole


class Act(SessionRequest):
    """A request to apply the moves of agents. The moves are simultaneous if several agents may move."""

    actions: dict[str, str]
    final: str | None = None
    allow_answers: Whole | None = None


class ScoreText(SessionRequest):
    """A request to score a text as if it were an agent's answer, without making a move."""

    agent: str
    text: str


REQUESTS: Mapping[str, type[Body]] = {
    "list": ListEnvironments,
    "describe": EnvironmentRequest,
    "check": Check,
    "task": GetTask,
    "extract": Extract,
    "script": Script,
    "recorded": RecordedText,
    "register": Register,
    "reset": Reset,
    "act": Act,
    "observe": SessionRequest,
    "score": ScoreText,
    "outcome": SessionRequest,
    "close": SessionRequest,
}


# -------- Responses


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The limits of an environment server."""

    sessions: int = 4096
    """The maximum number of open sessions."""
    call_seconds: float = 600.0
    """Maximum time in seconds of one call of an environment."""
    connections: int = 4096
    """The maximum number of open WebSockets."""
    unanswered: int = 8192
    """The maximum number of unanswered requests of one connection. A caller with more requests is disconnected."""
    held_bytes: int = 256 << 20
    """The maximum number of bytes of a connection's unanswered requests and their responses. If the maximum is reached, further
    requests wait."""


@dataclass
class Raised(Exception):
    """An error that was raised by an environment, as its class and message."""

    form: list[str]


def shutting_down() -> RequestError:
    """Return the error for a request that is rejected during shutdown."""
    message = "The server is shutting down. Use another server, or retry later."
    return RequestError(503, message, None, "leaving")


class EnvironmentHost:
    """Responds to requests about environments and sessions. The environments run on a thread with its own event loop."""

    def __init__(
        self, registry: EnvironmentRegistry, loop: LoopThread, limits: SessionLimits, *, guarded: bool
    ) -> None:
        """Create the host. The argument `guarded` states whether the server requires a token."""
        self.registry, self.limits, self._loop, self._guarded = registry, limits, loop, guarded
        self.connections: set[OpenSessions] = set()
        """The open sessions of each caller."""
        self._closing: set[Future[None]] = set()
        self.draining = False
        """Whether new sessions are rejected."""
        self.ended = False
        """Whether all requests are rejected."""
        self.in_progress = 0
        """The number of requests in progress."""

    @property
    def sessions(self) -> list[WorkerSession]:
        """The open sessions."""
        return [session for each in list(self.connections) for session in list(each.open.values())]

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine of an environment on the thread of the environments. Raises `Raised` if the coroutine raises an error."""
        try:
            return await self._loop.ask(work)
        except (RequestError, asyncio.CancelledError):
            raise
        except WorkerLost as lost:
            raise RequestError(410 if lost.blamed else 503, f"The episode is lost: {lost}") from None
        except BaseException as error:  # noqa: BLE001 - the one boundary where an environment's error becomes a response
            raise Raised(error_form(error)) from None

    async def _call(self, environment: Environment, method: str, work: Callable[[], T]) -> T:
        """Call a synchronous method of an environment within the time limit; see `run`."""
        what = f"`{method}` of environment '{environment.name}'"

        async def done() -> T:
            return call(what, "environment", self.limits.call_seconds, work)

        return await self.run(done)

    def close_later(self, session: WorkerSession) -> None:
        """Start closing a session in the background. Errors are ignored."""
        closing = self._loop.begin(session.close)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def close(self, seconds: float) -> None:
        """Wait at most `seconds` until all sessions are closed. Any thread may call this method after the server has stopped."""
        wait(list(self._closing), seconds)

    async def answer(self, name: str, fields: Any, sessions: OpenSessions) -> Any:
        """Return the response to the request `name` of a caller as JSON values. Raises RequestError or `Raised`."""
        if name not in REQUESTS:
            raise wrong(f"`call` must be one of {', '.join(REQUESTS)}.", "call")
        request = read_body(REQUESTS[name], fields)
        match request:
            case ListEnvironments():
                found = [asdict(each.description) for each in self.registry.current.values()]
                return {"protocol": VERSION, "software": version("kapelle"), "environments": found}
            case Register():
                return await self._register(request)
            case Reset():
                return await self._reset(request, sessions)
            case SessionRequest():
                return await self._in_session(name, request, sessions)
        assert isinstance(request, EnvironmentRequest), "the remaining requests"
        registered = self.registry.find(request.environment)
        environment = registered.environment
        match request:
            case Check(agents=agents):
                await self._call(environment, name, lambda: environment.check(_distinct(agents)))
                return None
            case GetTask(split=split, index=index):
                return task_form(await self._task(registered, split, index))
            case Extract(text=text):
                answerable = _offering(environment, Answerable, "comparable answers")
                return await self._call(environment, name, lambda: answerable.extract(text))
            case Script(agent=agent, seed=seed):
                scripted, task = _offering(environment, Scripted, "script"), request.task.task()
                messages = [message_from(each) for each in request.messages]
                return await self._call(
                    environment, name, lambda: scripted.script(agent, task, messages, seed)
                )
            case RecordedText(agent=agent, turn=turn, sample=sample):
                record, task = _offering(environment, Recorded, "recorded answers"), request.task.task()
                recorded = await self._call(
                    environment, name, lambda: record.recorded(agent, task, turn, sample)
                )
                return recorded if isinstance(recorded, str) else recorded.content
        return asdict(registered.description)

    async def _task(self, registered: RegisteredEnvironment, split: Split, index: int) -> Task:
        size = registered.description.sizes[split]
        if size is not None and index >= size:
            raise RequestError(
                416, f"Split '{split}' has {size} tasks, so task {index} does not exist.", "index"
            )
        environment = registered.environment
        return await self._call(environment, "task", lambda: task_of(environment, split, index))

    async def _register(self, request: Register) -> Any:
        if not self._guarded:
            raise RequestError(
                403,
                f"This server has no token, so its environments cannot be replaced. Start it with {TOKEN}.",
            )
        kind = request.settings.get("name")
        if not request.name.isprintable() or not isinstance(kind, str):
            raise wrong(
                '`name` must be printable, and `settings` must describe an environment: {"name": "arithmetic", …}.'
            )
        form = {"class": kind, "settings": request.settings}

        async def put() -> RegisteredEnvironment:
            return self.registry.put(request.name, environment_from(form))

        try:
            registered = await self._loop.ask(put)
        except pydantic.ValidationError as error:
            raise wrong(f"Invalid settings of '{kind}': {error}") from None
        except KapelleError as error:
            raise wrong(str(error)) from None
        used = [session.environment for session in self.sessions]
        for old in self.registry.replaced:
            if old.workers is not None and not any(each is old.environment for each in used):
                await asyncio.to_thread(old.workers.close)
        return asdict(registered.description)

    async def _reset(self, request: Reset, sessions: OpenSessions) -> Any:
        registered, agents = self.registry.find(request.environment), _distinct(request.agents)
        if (request.task is None) is (request.index is None):
            raise wrong("Give either a `task` or an `index` with its `split`.")
        if request.task is not None:
            task = request.task.task()
        else:
            task = await self._task(registered, request.split, request.index or 0)
        if self.draining:
            raise shutting_down()
        if request.session in sessions.open:
            raise wrong("`session` is already open. Choose another number.", "session")
        if len(self.sessions) >= self.limits.sessions:
            raise busy(
                f"{self.limits.sessions:,} sessions are open, which is the limit. Call `reset` again later."
            )
        most = self.limits.call_seconds
        patience = replace(
            Patience(),
            environment=min(request.call_seconds or most, most),
            grader=min(request.grader_seconds, Patience.grader),
        )
        opens = open_state if registered.workers is None else registered.workers.open_state
        session = WorkerSession(opens, registered.environment, patience, agents)
        began = await sessions.begin(request.session, session, task, request.seed)
        return {**began, "version": registered.description.version}

    async def _in_session(self, name: str, request: SessionRequest, sessions: OpenSessions) -> Any:
        session = sessions.open.get(request.session)
        if name != "close" and (session is None or not session.begun):
            message = "There is no such session: it was closed, or its `reset` has not finished."
            raise RequestError(404, message, "session")
        if name == "score" and session is not None and not session.state.scorable:
            raise wrong("This environment cannot score a text before the episode ends.")
        return await sessions.answer(request.session, {"call": name, **request.model_dump()})


def _offering(environment: Environment, capability: type[C], what: str) -> C:
    if not offers(environment, capability):
        raise wrong(f"This environment has no {what}.")
    return environment


def _distinct(names: list[str]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise wrong("`agents` contains a name twice. Remove it.", "agents")
    return tuple(names)
