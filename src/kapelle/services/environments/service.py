"""The methods of the environment contract, over sessions whose worlds live on a thread of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from typing import Any, TypeVar, cast

import grpc

from kapelle.environment import Answerable, Environment, Recorded, Scripted, offers
from kapelle.environments.bounded_worlds import task_of
from kapelle.environments.elsewhere import WorkerLost
from kapelle.rollout.workers.session import OpenWorld, Session, error_form
from kapelle.runtime.deadlines import Patience, call, patience_here
from kapelle.services.environments.sessions import Sessions
from kapelle.services.environments.shelf import SPLITS, Held, Shelf
from kapelle.services.grpc.refusals import Refused, busy, leaving, wrong
from kapelle.services.log import log_failure
from kapelle.types import Task
from kapelle.wire import LARGEST
from kapelle.wire import environment_v1_pb2 as pb
from kapelle.wire import environment_v1_pb2_grpc as pb_grpc
from kapelle.wire.values import from_message, from_task, to_map, to_task

# -------- From questions of the contract to sessions, and from what they answer to the contract's messages


def view_message(view: Mapping[str, Any]) -> pb.View:
    """Return a session's view as a message."""
    shown, movers = view["shown"], view["movers"]
    return pb.View(
        movers=movers.get("value", ()),
        movers_error=raised(movers["error"]) if "error" in movers else None,
        shown={agent: seen["value"] for agent, seen in shown.items() if "value" in seen},
        shown_errors={agent: raised(seen["error"]) for agent, seen in shown.items() if "error" in seen},
    )


def act_message(answer: Mapping[str, Any]) -> pb.ActReply:
    """Return the answer to a move as a message."""
    return pb.ActReply(rewards=_rewards(answer["rewards"]), view=view_message(answer["view"]))


def act_question(asked: pb.ActRequest) -> dict[str, Any]:
    """Return a move as a session takes it."""
    question: dict[str, Any] = {
        "call": "act",
        "actions": {move.agent: move.text for move in asked.moves},
        "final": asked.final if asked.HasField("final") else None,
    }
    if asked.HasField("answers_allowed"):
        question["allow_answers"] = asked.answers_allowed
    return question


def outcome_message(outcome: Mapping[str, Any]) -> pb.Outcome:
    """Return a session's outcome as a message."""
    return pb.Outcome(
        rewards=_rewards(outcome["rewards"]),
        success=outcome["success"],
        info=to_map(outcome["info"], "info"),
        truncated=outcome["truncated"],
        roles=[pb.Role(agent=agent, role=role) for agent, role in outcome["roles"].items()],
    )


def raised(form: list[str]) -> str:
    """Return the message of what an environment raised."""
    return ": ".join(form)


def _rewards(rewards: Mapping[str, float]) -> list[pb.Reward]:
    return [pb.Reward(agent=agent, amount=amount) for agent, amount in rewards.items()]


# -------- One stream of questions about sessions: many under way at once, answered as they are done

UNDER_WAY = 4096
"""Questions of one stream that are not answered yet."""
Answered = tuple[str, Any]
"""The kind of an answer, and its message."""


class OneStream:
    """The questions of one caller and the sessions that it opened here."""

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
        """Read no more questions; the stream ends when those that were read are answered."""
        self._ended = True
        if self._reading is not None:
            self._reading.cancel()

    async def answers(self, questions: AsyncIterator[pb.StreamQuestion]) -> AsyncIterator[pb.StreamAnswer]:
        """Yield answers until there are no more questions and all are answered; Refused where the server ends first."""
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
CONTRACT = 1
"""The version of the contract that is served."""
MOST_AGENTS = 256
MOST_BATCH = 1024
"""Moves in one BatchAct."""
LOOK_SECONDS = 1.0
"""Between two looks for sessions that nobody asks about."""
Opens = Callable[[Held], OpenWorld]
"""Returns how the worlds of an environment are opened."""


class EnvironmentService(pb_grpc.EnvironmentsServicer):
    """See `proto/kapelle/wire/environment_v1.proto`, which says what each method does."""

    name = "kapelle.environment.v1.Environments"

    def __init__(self, shelf: Shelf, sessions: Sessions, opens: Opens) -> None:
        """Take the environments, the table of sessions, and how worlds are opened."""
        self._shelf, self._sessions, self._opens = shelf, sessions, opens
        self._streams: set[OneStream] = set()
        self._looking: asyncio.Task[None] | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """See `GrpcService`."""
        pb_grpc.add_EnvironmentsServicer_to_server(self, server)
        self._looking = asyncio.create_task(self._look())

    async def settle(self) -> None:
        """See `GrpcService`: open sessions may be played to their end, as long as there is time."""
        self._sessions.leaving = True
        try:
            await self._sessions.over()
        finally:
            for stream in self._streams:
                stream.end()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._sessions.expire()

    # What an environment is.

    async def List(self, asked: pb.ListRequest, _: object) -> pb.ListReply:
        """See the contract."""
        held = [each.description for each in self._shelf.all()]
        return pb.ListReply(contract=CONTRACT, software=version("kapelle"), environments=held)

    async def Describe(self, asked: pb.DescribeRequest, _: object) -> pb.Description:
        """See the contract."""
        return self._shelf.find(asked.environment).description

    async def Check(self, asked: pb.CheckRequest, _: object) -> pb.CheckReply:
        """See the contract."""
        agents = _agents(asked.agents)
        await self._about(asked.environment, "check", lambda environment: environment.check(agents))
        return pb.CheckReply()

    async def GetTask(self, asked: pb.GetTaskRequest, _: object) -> pb.Task:
        """See the contract."""
        held = self._shelf.find(asked.environment)
        task = await self._task(held, pb.Pick(split=asked.split, index=asked.index))
        return _sent(to_task, task)

    async def Extract(self, asked: pb.ExtractRequest, _: object) -> pb.ExtractReply:
        """See the contract."""
        answerable = self._shelf.find(asked.environment).environment
        if not offers(answerable, Answerable):
            raise _lacking("answers to compare")
        return pb.ExtractReply(
            answer=await self._about(asked.environment, "extract", lambda _: answerable.extract(asked.text))
        )

    async def Script(self, asked: pb.ScriptRequest, _: object) -> pb.TextReply:
        """See the contract."""
        scripted = self._shelf.find(asked.environment).environment
        if not offers(scripted, Scripted):
            raise _lacking("script")
        task, messages = _task_in(asked.task), [from_message(each) for each in asked.messages]
        return pb.TextReply(
            text=await self._about(
                asked.environment,
                "script",
                lambda _: scripted.script(asked.agent, task, messages, asked.seed),
            )
        )

    async def Recorded(self, asked: pb.RecordedRequest, _: object) -> pb.TextReply:
        """See the contract."""
        recorded = self._shelf.find(asked.environment).environment
        if not offers(recorded, Recorded):
            raise _lacking("recorded answers")
        task = _task_in(asked.task)
        return pb.TextReply(
            text=await self._about(
                asked.environment,
                "recorded",
                lambda _: recorded.recorded(asked.agent, task, asked.turn, asked.sample),
            )
        )

    async def _about(self, name: str, method: str, ask: Callable[[Environment], T]) -> T:
        """Ask an environment something that it answers at once."""
        environment = self._shelf.find(name).environment
        seconds = self._sessions.limits.call_seconds

        async def work() -> T:
            return call(
                f"`{method}` of environment '{environment.name}'", "environment", seconds, ask, environment
            )

        return await _or_refused(self._sessions.beside(work))

    async def _task(self, held: Held, pick: pb.Pick) -> Task:
        if pick.split not in SPLITS:
            raise wrong(f"There is no split '{pick.split}', but train and test.")
        size = {split.split: split.size for split in held.description.splits if split.HasField("size")}
        if pick.split in size and pick.index >= size[pick.split]:
            raise Refused(
                "OUT_OF_RANGE", f"Split '{pick.split}' has {size[pick.split]} tasks, and none {pick.index}."
            )

        async def work() -> Task:
            return task_of(held.environment, cast("Any", pick.split), pick.index)

        return await _or_refused(self._sessions.beside(work))

    # Episodes.

    async def Reset(self, asked: pb.ResetRequest, _: object) -> pb.ResetReply:
        """See the contract."""
        return await self.reset(asked)

    async def reset(self, asked: pb.ResetRequest, *, streamed: bool = False) -> pb.ResetReply:
        """Open a session, which a stream may hold."""
        held, agents = self._shelf.find(asked.environment), _agents(asked.agents)
        kind = asked.WhichOneof("what")
        if kind is None:
            raise wrong("Name what is played: a `task`, or a `pick` of split and index.")
        task = _task_in(asked.task) if kind == "task" else await self._task(held, asked.pick)
        patience = self._patience(asked)
        session = Session(self._opens(held), held.environment, patience, agents)

        async def begin() -> dict[str, Any]:
            patience_here.set(patience)
            return await session.reset(task, asked.seed)

        opened, began = await _or_refused(self._sessions.begin(held, session, begin, streamed=streamed))
        return pb.ResetReply(
            session=opened.id,
            version=held.description.version,
            scorable=began["scorable"],
            idle_seconds=self._sessions.limits.idle_seconds,
            view=view_message(began["view"]),
        )

    def _patience(self, asked: pb.ResetRequest) -> Patience:
        most = self._sessions.limits.call_seconds
        wanted = (asked.call_seconds or most, asked.grader_seconds or Patience.grader)
        if not all(seconds > 0 for seconds in wanted):
            raise wrong("`call_seconds` and `grader_seconds` are more than 0, or left out.")
        return replace(Patience(), environment=min(wanted[0], most), grader=min(wanted[1], Patience.grader))

    async def Observe(self, asked: pb.ObserveRequest, _: object) -> pb.View:
        """See the contract."""
        return await self.observe(asked)

    async def observe(self, asked: pb.ObserveRequest) -> pb.View:
        """Return all that is seen, changed or not."""

        async def look(session: Session) -> dict[str, Any]:
            return {**session.view(), "shown": dict(session.shown)}

        return view_message(await self._in(asked.session, look))

    async def Act(self, asked: pb.ActRequest, _: object) -> pb.ActReply:
        """See the contract."""
        return await self.act(asked)

    async def act(self, asked: pb.ActRequest) -> pb.ActReply:
        """Let agents move."""
        if len({move.agent for move in asked.moves}) != len(asked.moves):
            raise wrong("An agent moves twice. Give one text for each agent that moves.")
        question = act_question(asked)

        async def make() -> pb.ActReply:
            return act_message(await self._in(asked.session, lambda session: session.answer(question)))

        return await self._sessions.find(asked.session).moves.act(asked, make)

    async def BatchAct(self, asked: pb.BatchActRequest, _: object) -> pb.BatchActReply:
        """See the contract."""
        if len(asked.acts) > MOST_BATCH:
            raise wrong(f"{len(asked.acts):,} moves at once; {MOST_BATCH:,} are the most.")

        async def one(act: pb.ActRequest) -> pb.ActResult:
            try:
                return pb.ActResult(reply=await self.act(act))
            except Refused as refused:
                return pb.ActResult(error=pb.Error(code=refused.code, message=refused.message))

        return pb.BatchActReply(results=await asyncio.gather(*map(one, asked.acts)))

    async def Score(self, asked: pb.ScoreRequest, _: object) -> pb.ScoreReply:
        """See the contract."""
        return await self.score(asked)

    async def score(self, asked: pb.ScoreRequest) -> pb.ScoreReply:
        """Return what a text would earn."""
        question = {"call": "score", "agent": asked.agent, "text": asked.text}

        async def scored(session: Session) -> Any:
            if not session.world.scorable:
                raise Refused(
                    "FAILED_PRECONDITION", "This world cannot score a text before the episode is over."
                )
            return await session.answer(question)

        return pb.ScoreReply(score=await self._in(asked.session, scored))

    async def GetOutcome(self, asked: pb.OutcomeRequest, _: object) -> pb.Outcome:
        """See the contract."""
        return await self.outcome(asked)

    async def outcome(self, asked: pb.OutcomeRequest) -> pb.Outcome:
        """Return how the episode ended."""

        async def ask() -> pb.Outcome:
            answer = await self._in(asked.session, lambda session: session.answer({"call": "outcome"}))
            return _sent(outcome_message, answer)

        return await self._sessions.find(asked.session).moves.outcome(ask)

    async def Close(self, asked: pb.CloseRequest, _: object) -> pb.CloseReply:
        """See the contract."""
        return await self.close(asked)

    async def close(self, asked: pb.CloseRequest) -> pb.CloseReply:
        """Free a session."""
        await _or_refused(self._sessions.close(asked.session))
        return pb.CloseReply()

    async def _in(self, name: str, work: Callable[[Session], Awaitable[T]]) -> T:
        patience = self._sessions.find(name).session.patience

        async def limited(session: Session) -> T:
            patience_here.set(patience)
            return await work(session)

        return await _or_refused(self._sessions.ask(name, limited))

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
            began = await self.reset(question, streamed=True)
            stream.sessions.add(began.session)
            return kind, began
        if kind == "close":
            stream.sessions.discard(question.session)
        return kind, await getattr(self, kind)(question)


async def _or_refused(work: Awaitable[T]) -> T:
    """Do something in an environment; what it raises is told to the caller, as its kind and what it says."""
    try:
        return await work
    except (Refused, asyncio.CancelledError):
        raise
    except WorkerLost as lost:
        raise Refused("DATA_LOSS" if lost.blamed else "UNAVAILABLE", f"The world is lost: {lost}") from None
    except BaseException as error:
        raise Refused("ABORTED", raised(error_form(error))) from None


def _sent(form: Callable[[Any], T], value: object) -> T:
    """Return the message of what an environment made; Refused for what has no form in one."""
    try:
        return form(value)
    except TypeError as error:
        raise Refused("ABORTED", f"EpisodeError: {error}.") from None


def _lacking(what: str) -> Refused:
    return Refused("FAILED_PRECONDITION", f"This environment has no {what}.")


def _agents(names: Any) -> tuple[str, ...]:
    agents = tuple(names)
    if not agents or len(agents) > MOST_AGENTS or len(set(agents)) != len(agents) or not all(agents):
        raise wrong(f"Name the agents in seat order: 1 to {MOST_AGENTS} names, each once.")
    return agents


def _task_in(message: pb.Task) -> Task:
    with suppress(ValueError, RecursionError):
        return from_task(message)
    raise wrong("The data of `task` cannot be read: a key that no mapping can have, or too many digits.")
