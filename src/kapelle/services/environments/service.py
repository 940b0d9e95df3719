"""The environment server: worlds offered to runs on this and other machines, over gRPC.

    with serve_environments({"sums": Arithmetic()}, Binding(), SessionLimits()) as server:
        print(server.address)

`proto/kapelle/wire/environment_v1.proto` is the contract: it says what each method does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import pydantic

from kapelle.environment import Answerable, Environment, Recorded, Scripted, offers, task_of
from kapelle.environments.remote.messages import from_message, from_task, to_map, to_task
from kapelle.errors import KapelleError
from kapelle.rollout.bounded_worlds import open_world
from kapelle.rollout.workers.session import WorkerSession
from kapelle.runtime.deadlines import Patience, call
from kapelle.runtime.event_loop import LoopThread
from kapelle.services.binding import TOKEN, Binding, log_failure
from kapelle.services.environments.sessions import (
    SPLITS,
    SessionLimits,
    Shelf,
    ShelvedEnvironment,
    WorldSessions,
)
from kapelle.services.grpc import Caps, GrpcServer, GrpcService, Refused, busy, leaving, wrong
from kapelle.setup.environment_forms import environment_from
from kapelle.types import Task
from kapelle.wire import LARGEST
from kapelle.wire import environment_v1_pb2 as pb
from kapelle.wire import environment_v1_pb2_grpc as pb_grpc

# -------- Answers of sessions as messages of the contract


def view_message(view: Mapping[str, Any]) -> pb.View:
    """Return a session's view as a message."""
    shown, movers = view["shown"], view["movers"]
    return pb.View(
        movers=movers.get("value", ()),
        movers_error=": ".join(movers["error"]) if "error" in movers else None,
        shown={agent: seen["value"] for agent, seen in shown.items() if "value" in seen},
        shown_errors={agent: ": ".join(seen["error"]) for agent, seen in shown.items() if "error" in seen},
    )


def outcome_message(outcome: Mapping[str, Any]) -> pb.Outcome:
    """Return a session's outcome as a message."""
    return pb.Outcome(
        rewards=[pb.Reward(agent=agent, amount=paid) for agent, paid in outcome["rewards"].items()],
        success=outcome["success"],
        info=to_map(outcome["info"], "info"),
        truncated=outcome["truncated"],
        roles=[pb.Role(agent=agent, role=role) for agent, role in outcome["roles"].items()],
    )


# -------- One stream of questions about sessions: many under way at once, answered as they are done

UNDER_WAY = 4096
"""Most questions of one stream that wait for their answers."""
Answered = tuple[str, Any]
"""The kind of an answer, and its message."""


class OneStream:
    """The questions of one caller, and the sessions that it has opened."""

    def __init__(self, answer: Callable[[pb.StreamQuestion, OneStream], Awaitable[Answered]]) -> None:
        """Take what answers one question."""
        self._answer = answer
        self.sessions: set[str] = set()
        self._done: asyncio.Queue[pb.StreamAnswer | None] = asyncio.Queue()
        self._asked: set[asyncio.Task[None]] = set()
        self._unsent = 0
        self._reading: asyncio.Task[None] | None = None
        self._ended = False

    def end(self) -> None:
        """Stop reading questions; the stream ends when those that were read are answered."""
        self._ended = True
        if self._reading is not None:
            self._reading.cancel()

    async def answers(self, questions: AsyncIterator[pb.StreamQuestion]) -> AsyncIterator[pb.StreamAnswer]:
        """Yield answers until the questions end and all are answered; Refused if the server ends first."""
        self._reading = asyncio.create_task(self._read(questions))
        try:
            while (answer := await self._done.get()) is not None:
                yield answer
                self._unsent -= 1
            if self._ended:
                raise leaving()
            self._reading.result()  # what was no question ends the stream with that error
        finally:
            self._reading.cancel()
            for task in self._asked:
                task.cancel()

    async def _read(self, questions: AsyncIterator[pb.StreamQuestion]) -> None:
        try:
            async for question in questions:
                self._unsent += 1
                if self._unsent > UNDER_WAY:
                    full = busy(
                        f"{UNDER_WAY:,} questions of this stream are not answered yet. Ask again later."
                    )
                    self._done.put_nowait(_refusal(question.number, full))
                    continue
                task = asyncio.create_task(self._one(question))
                self._asked.add(task)
                task.add_done_callback(self._asked.discard)
        finally:
            if self._asked:
                await asyncio.wait(self._asked)
            self._done.put_nowait(None)

    async def _one(self, question: pb.StreamQuestion) -> None:
        try:
            kind, message = await self._answer(question, self)
            answer = pb.StreamAnswer(number=question.number, **{kind: message})
            if answer.ByteSize() > LARGEST:  # sent, it would end the whole stream
                raise Refused("ABORTED", f"EpisodeError: The answer has more than {LARGEST:,} bytes.")
        except Refused as refused:
            answer = _refusal(question.number, refused)
        except Exception as error:
            log_failure("A question of a stream failed.", error)
            answer = _refusal(question.number, Refused("INTERNAL", "The service failed; its log says why."))
        self._done.put_nowait(answer)


def _refusal(number: int, refused: Refused) -> pb.StreamAnswer:
    return pb.StreamAnswer(number=number, error=pb.Error(code=refused.code, message=refused.message))


T = TypeVar("T")
C = TypeVar("C")
CONTRACT = 1
"""The version of the contract that is served."""
MOST_AGENTS = 256
MOST_BATCH = 1024
"""Moves in one BatchAct."""


class EnvironmentService(pb_grpc.EnvironmentsServicer, GrpcService):
    """See `proto/kapelle/wire/environment_v1.proto`, which says what each method does."""

    name = "kapelle.environment.v1.Environments"

    def __init__(self, shelf: Shelf, sessions: WorldSessions) -> None:
        """Take the environments and the table of sessions."""
        self._shelf, self._sessions = shelf, sessions
        self._streams: set[OneStream] = set()
        self._looking: asyncio.Task[None] | None = None

    def register(self, server: Any) -> None:
        """See `GrpcService`."""
        pb_grpc.add_EnvironmentsServicer_to_server(self, server)
        self._looking = asyncio.create_task(self._sessions.expire())

    async def settle(self) -> None:
        """See `GrpcService`: open sessions may be played to their end, as long as there is time."""
        self._sessions.leaving = True
        try:
            while len(self._sessions):  # noqa: ASYNC110 - several places end sessions
                await asyncio.sleep(0.05)
        finally:
            for stream in self._streams:
                stream.end()

    # What an environment is.

    async def List(self, asked: pb.ListRequest, _: object) -> pb.ListReply:
        """See the contract."""
        held = [each.description for each in self._shelf.held.values()]
        return pb.ListReply(contract=CONTRACT, software=version("kapelle"), environments=held)

    async def Describe(self, asked: pb.DescribeRequest, _: object) -> pb.Description:
        """See the contract."""
        return self._shelf.find(asked.environment).description

    async def Check(self, asked: pb.CheckRequest, _: object) -> pb.CheckReply:
        """See the contract."""
        environment, agents = self._shelf.find(asked.environment).environment, _agents(asked.agents)
        await self._about(environment, "check", partial(environment.check, agents))
        return pb.CheckReply()

    async def GetTask(self, asked: pb.GetTaskRequest, _: object) -> pb.Task:
        """See the contract."""
        held = self._shelf.find(asked.environment)
        task = await self._task(held, pb.Pick(split=asked.split, index=asked.index))
        return _sent(to_task, task)

    async def Extract(self, asked: pb.ExtractRequest, _: object) -> pb.ExtractReply:
        """See the contract."""
        answerable = self._offering(asked.environment, Answerable, "answers to compare")
        extract = partial(answerable.extract, asked.text)
        return pb.ExtractReply(answer=await self._about(answerable, "extract", extract))

    async def Script(self, asked: pb.ScriptRequest, _: object) -> pb.TextReply:
        """See the contract."""
        scripted = self._offering(asked.environment, Scripted, "script")
        task, messages = _task_in(asked.task), [from_message(each) for each in asked.messages]
        script = partial(scripted.script, asked.agent, task, messages, asked.seed)
        return pb.TextReply(text=await self._about(scripted, "script", script))

    async def Recorded(self, asked: pb.RecordedRequest, _: object) -> pb.TextReply:
        """See the contract."""
        record = self._offering(asked.environment, Recorded, "recorded answers")
        recorded = partial(record.recorded, asked.agent, _task_in(asked.task), asked.turn, asked.sample)
        text = await self._about(record, "recorded", recorded)
        return pb.TextReply(text=text if isinstance(text, str) else text.content)

    def _offering(self, name: str, capability: type[C], what: str) -> C:
        environment = self._shelf.find(name).environment
        if not offers(environment, capability):
            raise Refused("FAILED_PRECONDITION", f"This environment has no {what}.")
        return environment

    async def _about(self, environment: Any, method: str, ask: Callable[[], T]) -> T:
        """Ask an environment something that it answers at once."""
        what, seconds = f"`{method}` of environment '{environment.name}'", self._sessions.limits.call_seconds
        return await self._sessions.now(partial(call, what, "environment", seconds, ask))

    async def _task(self, held: ShelvedEnvironment, pick: pb.Pick) -> Task:
        if pick.split not in SPLITS:
            raise wrong(f"There is no split '{pick.split}', but train and test.")
        size = {split.split: split.size for split in held.description.splits if split.HasField("size")}
        if pick.split in size and pick.index >= size[pick.split]:
            raise Refused(
                "OUT_OF_RANGE", f"Split '{pick.split}' has {size[pick.split]} tasks, and none {pick.index}."
            )
        return await self._sessions.now(partial(task_of, held.environment, pick.split, pick.index))

    # Episodes.

    async def Reset(self, asked: pb.ResetRequest, _: object, *, streamed: bool = False) -> pb.ResetReply:
        """See the contract; `streamed` says that a stream holds the session."""
        held, agents = self._shelf.find(asked.environment), _agents(asked.agents)
        kind = asked.WhichOneof("what")
        if kind is None:
            raise wrong("Name what is played: a `task`, or a `pick` of split and index.")
        task = _task_in(asked.task) if kind == "task" else await self._task(held, asked.pick)
        most = self._sessions.limits.call_seconds
        wanted = (asked.call_seconds or most, asked.grader_seconds or Patience.grader)
        if not all(seconds > 0 for seconds in wanted):
            raise wrong("`call_seconds` and `grader_seconds` are more than 0, or left out.")
        patience = replace(
            Patience(), environment=min(wanted[0], most), grader=min(wanted[1], Patience.grader)
        )
        opens = open_world if held.workers is None else held.workers.open_world
        session = WorkerSession(opens, held.environment, patience, agents)
        opened, began = await self._sessions.begin(held, session, task, asked.seed, streamed=streamed)
        return pb.ResetReply(
            session=opened.id,
            version=held.description.version,
            scorable=began["scorable"],
            idle_seconds=self._sessions.limits.idle_seconds,
            view=view_message(began["view"]),
        )

    async def Observe(self, asked: pb.ObserveRequest, _: object) -> pb.View:
        """See the contract."""
        return view_message(await self._sessions.ask(asked.session, {"call": "observe"}))

    async def Act(self, asked: pb.ActRequest, _: object) -> pb.ActReply:
        """See the contract."""
        if len({move.agent for move in asked.moves}) != len(asked.moves):
            raise wrong("An agent moves twice. Give one text for each agent that moves.")
        question: dict[str, Any] = {
            "call": "act",
            "actions": {move.agent: move.text for move in asked.moves},
            "final": asked.final if asked.HasField("final") else None,
        }
        if asked.HasField("answers_allowed"):
            question["allow_answers"] = asked.answers_allowed

        async def make() -> pb.ActReply:
            answer = await self._sessions.ask(asked.session, question)
            rewards = [pb.Reward(agent=agent, amount=paid) for agent, paid in answer["rewards"].items()]
            return pb.ActReply(rewards=rewards, view=view_message(answer["view"]))

        return await self._sessions.find(asked.session).moves.act(asked, make)

    async def BatchAct(self, asked: pb.BatchActRequest, _: object) -> pb.BatchActReply:
        """See the contract."""
        if len(asked.acts) > MOST_BATCH:
            raise wrong(f"{len(asked.acts):,} moves at once; {MOST_BATCH:,} are the most.")

        async def one(act: pb.ActRequest) -> pb.ActResult:
            try:
                return pb.ActResult(reply=await self.Act(act, _))
            except Refused as refused:
                return pb.ActResult(error=pb.Error(code=refused.code, message=refused.message))

        return pb.BatchActReply(results=await asyncio.gather(*map(one, asked.acts)))

    async def Score(self, asked: pb.ScoreRequest, _: object) -> pb.ScoreReply:
        """See the contract."""
        if not self._sessions.find(asked.session).session.world.scorable:
            raise Refused("FAILED_PRECONDITION", "This world cannot score a text before the episode is over.")
        question = {"call": "score", "agent": asked.agent, "text": asked.text}
        return pb.ScoreReply(score=await self._sessions.ask(asked.session, question))

    async def GetOutcome(self, asked: pb.OutcomeRequest, _: object) -> pb.Outcome:
        """See the contract."""

        async def ask() -> pb.Outcome:
            return _sent(outcome_message, await self._sessions.ask(asked.session, {"call": "outcome"}))

        return await self._sessions.find(asked.session).moves.outcome(ask)

    async def Close(self, asked: pb.CloseRequest, _: object) -> pb.CloseReply:
        """See the contract."""
        await self._sessions.close(asked.session)
        return pb.CloseReply()

    async def Stream(
        self, questions: AsyncIterator[pb.StreamQuestion], _: object
    ) -> AsyncIterator[pb.StreamAnswer]:
        """See the contract."""
        stream = OneStream(self._answer)
        self._streams.add(stream)
        try:
            async for answer in stream.answers(questions):
                yield answer
        finally:
            self._streams.discard(stream)
            for session in stream.sessions:
                self._sessions.free(session)

    async def _answer(self, asked: pb.StreamQuestion, stream: OneStream) -> Answered:
        kind = asked.WhichOneof("question")
        if kind is None:
            raise wrong("The question is empty.")
        question = getattr(asked, kind)
        if kind == "reset":
            began = await self.Reset(question, None, streamed=True)
            stream.sessions.add(began.session)
            return kind, began
        if kind == "close":
            stream.sessions.discard(question.session)
        method: Callable[..., Awaitable[Any]] = {
            "observe": self.Observe,
            "act": self.Act,
            "score": self.Score,
            "outcome": self.GetOutcome,
            "close": self.Close,
        }[kind]
        return kind, await method(question, None)


def _sent(form: Callable[[Any], T], value: object) -> T:
    """Return a value of an environment as a message; Refused for a value that messages cannot hold."""
    try:
        return form(value)
    except TypeError as error:
        raise Refused("ABORTED", f"EpisodeError: {error}.") from None


def _agents(names: Any) -> tuple[str, ...]:
    agents = tuple(names)
    if not agents or len(agents) > MOST_AGENTS or len(set(agents)) != len(agents) or not all(agents):
        raise wrong(f"Name the agents in seat order: 1 to {MOST_AGENTS} names, each once.")
    return agents


def _task_in(message: pb.Task) -> Task:
    with suppress(ValueError, RecursionError):
        return from_task(message)
    raise wrong("The data of `task` cannot be read: a key that no mapping can have, or too many digits.")


# -------- Changing what an environment server holds while others play: only with a token, because it decides which code runs

LONGEST_NAME = 128


class ControlService(pb_grpc.EnvironmentControlServicer, GrpcService):
    """See `EnvironmentControl` in the contract."""

    name = "kapelle.environment.v1.EnvironmentControl"

    def __init__(self, shelf: Shelf, sessions: WorldSessions, worlds: LoopThread, *, guarded: bool) -> None:
        """`worlds` is the thread on which data are read; `guarded` says whether the server asks for a token."""
        self._shelf, self._sessions, self._worlds, self._guarded = shelf, sessions, worlds, guarded

    def register(self, server: Any) -> None:
        """See `GrpcService`."""
        pb_grpc.add_EnvironmentControlServicer_to_server(self, server)

    async def Register(self, asked: pb.RegisterRequest, _: object) -> pb.Description:
        """See the contract."""
        if not self._guarded:
            raise Refused(
                "FAILED_PRECONDITION",
                f"This server asks for no token, so what it runs cannot be changed. Start it with {TOKEN} set.",
            )
        if not asked.name.isprintable() or not 0 < len(asked.name) <= LONGEST_NAME:
            raise wrong(f"Name the environment: 1 to {LONGEST_NAME} printable characters.")
        try:
            settings: Any = json.loads(asked.settings)
        except (ValueError, RecursionError) as error:
            raise wrong(f"The settings are no JSON: {error}.") from None
        if not isinstance(settings, dict) or not isinstance(settings.get("name"), str):
            raise wrong('The settings are no environment. Write them as {"name": "arithmetic", …}.')

        async def put() -> ShelvedEnvironment:
            return self._shelf.put(asked.name, environment)

        try:
            environment = environment_from({"class": settings["name"], "settings": settings})
            held = await self._worlds.ask(put)
        except pydantic.ValidationError as error:
            raise wrong(f"These are no settings of '{settings['name']}': {error}") from None
        except KapelleError as error:
            raise wrong(str(error)) from None
        # The processes of what no session plays any more.
        for old in self._shelf.replaced:
            if old.workers is not None and not self._sessions.playing(old):
                await asyncio.to_thread(old.workers.close)
        return held.description


# -------- The server as a whole: a shelf, a thread of worlds, and the port

CLOSING_SECONDS = 5.0
"""For worlds to close after the server has ended."""


@dataclass(frozen=True, slots=True)
class EnvironmentServer:
    """An environment server that listens."""

    address: str
    shelf: Shelf
    grpc: GrpcServer
    sessions: WorldSessions

    def drain(self, seconds: float) -> bool:
        """Refuse new sessions, let open ones play for half the time, and return whether all accepted calls were answered."""
        return self.grpc.drain(seconds)


@contextmanager
def serve_environments(
    environments: Mapping[str, Environment],
    binding: Binding,
    limits: SessionLimits | None = None,
    caps: Caps | None = None,
    processes: int = 0,
) -> Iterator[EnvironmentServer]:
    """Serve environments by name while the block runs; their worlds live in `processes` processes, 0 for this one.

    Raises ConfigError if the port is taken, DataError for data that cannot be read.
    """
    limits = limits or SessionLimits()
    with ExitStack() as closing:
        shelf, worlds = (
            Shelf(environments, processes, limits.call_seconds),
            closing.enter_context(LoopThread()),
        )
        sessions = WorldSessions(worlds, limits)
        closing.callback(shelf.close)
        closing.callback(sessions.close_all, CLOSING_SECONDS)
        service = EnvironmentService(shelf, sessions)
        control = ControlService(shelf, sessions, worlds, guarded=binding.token is not None)
        caps = caps or Caps(streams=limits.sessions)
        with GrpcServer(binding, [service, control], caps) as server:
            yield EnvironmentServer(server.address, shelf, server, sessions)
