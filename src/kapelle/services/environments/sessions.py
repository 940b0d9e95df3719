"""What an environment server holds: environments by name, and the open sessions that play them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeVar

from kapelle.environment import (
    Alive,
    Answerable,
    Environment,
    Mixed,
    Reads,
    Recorded,
    Scripted,
    Skipping,
    WorkerLost,
    asks_questions,
    is_opposed,
    offers,
)
from kapelle.errors import did_you_mean
from kapelle.rollout.workers.pool import EnvironmentWorkers
from kapelle.rollout.workers.session import WorkerSession, error_form
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.event_loop import LoopThread
from kapelle.services.grpc import Refused, busy, leaving, wrong
from kapelle.settings.base import Settings
from kapelle.types import Split, Task
from kapelle.wire import environment_v1_pb2 as pb

T = TypeVar("T")

# -------- The shelf: environments by name, each with its version, replaced while others play the old one

SPLITS: tuple[Split, ...] = ("train", "test")


@dataclass(frozen=True, slots=True)
class ShelvedEnvironment:
    """An environment on the shelf."""

    environment: Environment
    description: pb.Description
    workers: EnvironmentWorkers | None
    """The processes in which its worlds live; None for this one."""


class Shelf:
    """Environments by name; any thread may ask."""

    def __init__(
        self, environments: Mapping[str, Environment], processes: int = 0, call_seconds: float = 600.0
    ) -> None:
        """Take the environments; each has so many `processes` for its worlds, in which a call may take `call_seconds`.

        Raises what reading their data raises, and ConfigError for an environment that another process cannot make.
        """
        self._processes, self._patience = processes, Patience(environment=call_seconds)
        self._changing = Lock()
        self.held: Mapping[str, ShelvedEnvironment] = {}
        """What is found, by name; another mapping after a change."""
        self.replaced: list[ShelvedEnvironment] = []
        """Those that are no longer found; sessions may still play them."""
        for name, environment in environments.items():
            self.put(name, environment)

    def find(self, name: str) -> ShelvedEnvironment:
        """Return an environment; an empty name means the only one. Raises Refused for an unknown name."""
        held = self.held
        if not name and len(held) == 1:
            return next(iter(held.values()))
        if name not in held:
            raise Refused(
                "NOT_FOUND",
                f"This server has no environment '{name}'.{did_you_mean(name, list(held))}",
            )
        return held[name]

    def put(self, name: str, environment: Environment) -> ShelvedEnvironment:
        """Add an environment or replace the one of that name; open sessions keep theirs.

        Raises Refused if it offers less than the one that it replaces, because runs rely on that.
        """
        with self._changing:
            old = self.held.get(name)
            new = describe(name, environment, 1 if old is None else old.description.version + 1)
            if old is not None:
                had = old.description
                # A test split without a size has no tasks of its own.
                tests = [
                    any(split.split == "test" and split.HasField("size") for split in each.splits)
                    for each in (had, new)
                ]
                for what, before, after in (
                    ("asks questions", had.answerable, new.answerable),
                    ("plays games of moves", not had.answerable, not new.answerable),
                    ("has a script", had.scripted, new.scripted),
                    ("is a record", had.answers_per_task, new.answers_per_task),
                    ("has tasks of their own to test on", *tests),
                ):
                    if before and not after:
                        raise wrong(
                            f"'{name}' {what}, and the environment that would replace it does not. Runs that play it rely on that. "
                            "Register it by another name."
                        )
            workers = None
            if self._processes:
                workers = EnvironmentWorkers(environment, self._processes, self._patience)
            held = ShelvedEnvironment(environment, new, workers)
            self.held = {**self.held, name: held}
            if old is not None:
                self.replaced.append(old)
            return held

    def close(self) -> None:
        """End the processes of all environments."""
        for held in (*self.held.values(), *self.replaced):
            if held.workers is not None:
                held.workers.close()


def describe(name: str, environment: Environment, version: int) -> pb.Description:
    """Return an environment's description in the contract; raises what reading its data raises."""
    least, greatest = environment.reward_range
    skipped = environment.skipped() if offers(environment, Skipping) else {}
    members = environment.members if offers(environment, Mixed) else {}
    # Its content: class, settings without the time limit, and the files that it declares.
    settings = (
        environment.model_dump(mode="json", exclude={"timeout"}) if isinstance(environment, Settings) else {}
    )
    read = dict(environment.contents()) if isinstance(environment, Reads) else {}
    kind = type(environment)
    form = [kind.__module__, kind.__qualname__, settings, sorted(read.values())]
    content = hashlib.sha256(json.dumps(form, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return pb.Description(
        name=name,
        version=version,
        content=content,
        kind=environment.name,
        least_reward=least,
        greatest_reward=greatest,
        splits=[
            pb.SplitDescription(
                split=split,
                source=environment.sources[split],
                size=environment.size(split),
                skipped=skipped.get(split, ""),
            )
            for split in SPLITS
        ],
        answerable=offers(environment, Answerable) and asks_questions(environment),
        scripted=offers(environment, Scripted),
        answers_per_task=environment.answers_per_task() if offers(environment, Recorded) else 0,
        constant_sum=is_opposed(environment),
        alive=environment.alive if offers(environment, Alive) else (),
        members=[describe(part, member, version) for part, member in members.items()],
    )


# -------- The moves of one session: a move that is sent again is answered as before, and not made twice


class Moves:
    """What a session was asked and answered last; for one event loop.

    A caller whose connection breaks cannot know whether its move was made. A move that is sent again with the same number
    gets its first answer, errors included; the world sees it once.
    """

    def __init__(self) -> None:
        self._made = 0
        self._asked = b""
        self._answer: _Once | None = None
        self._outcome: tuple[int, _Once] | None = None

    async def act(
        self, asked: pb.ActRequest, make: Callable[[], Coroutine[Any, Any, pb.ActReply]]
    ) -> pb.ActReply:
        """Make a move, or return what it brought when it was made; Refused if its number is neither of the two."""
        if not asked.HasField("number"):
            self._made, self._answer = self._made + 1, None
            return await make()
        body = asked.SerializeToString(deterministic=True)
        if asked.number == self._made and self._answer is not None:
            if body != self._asked:
                raise wrong(f"Move {asked.number} was made already, and was another one.")
        elif asked.number == self._made + 1:
            self._made, self._asked, self._answer = asked.number, body, _Once(make)
        else:
            raise Refused(
                "FAILED_PRECONDITION",
                f"This is move {asked.number}; the session has made {self._made}, and takes the last one again "
                "(where it had a number) or the next.",
            )
        reply: pb.ActReply = await self._answer.result()
        return reply

    async def outcome(self, ask: Callable[[], Coroutine[Any, Any, pb.Outcome]]) -> pb.Outcome:
        """Return how the episode ended: asked of the world once after a move."""
        if self._outcome is None or self._outcome[0] != self._made:
            self._outcome = self._made, _Once(ask)
        outcome: pb.Outcome = await self._outcome[1].result()
        return outcome


class _Once:
    """Work that is done once for all callers that ask for its result; cancelled when the last of them goes away."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._work = asyncio.create_task(work())
        # Looks at an error that no caller waits for any more, or Python would print it.
        self._work.add_done_callback(lambda work: work.cancelled() or work.exception())
        self._waiting = 0

    async def result(self) -> Any:
        self._waiting += 1
        try:
            return await asyncio.shield(self._work)
        except asyncio.CancelledError:
            if self._work.cancelled():
                raise Refused(
                    "NOT_FOUND", "Whoever asked first went away meanwhile: the session is closed."
                ) from None
            raise
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._work.cancel()


# -------- Sessions

LOOK_SECONDS = 1.0
"""Between two looks for sessions without calls."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How many worlds there may be and for how long."""

    sessions: int = 4096
    """Open at once."""
    idle_seconds: float = 600.0
    """Seconds without a call after which a session that no stream holds is closed."""
    call_seconds: float = 600.0
    """The most that one call of a world may take."""


@dataclass(eq=False)
class Open:
    """An open session."""

    id: str
    held: ShelvedEnvironment
    session: WorkerSession
    streamed: bool
    """Whether a stream holds it, and so ends it."""
    used: float = field(default_factory=time.monotonic)
    asked: int = 0
    """Questions under way."""
    moves: Moves = field(default_factory=Moves)


class WorldSessions:
    """Open sessions by id; for one event loop. Worlds live on a thread of their own."""

    def __init__(self, worlds: LoopThread, limits: SessionLimits) -> None:
        self.limits = limits
        self._worlds = worlds
        self._open: dict[str, Open] = {}
        self._closing: set[Future[None]] = set()
        self._beginning = 0
        self.leaving = False
        """Whether new sessions are refused."""

    def __len__(self) -> int:
        return len(self._open) + self._beginning

    async def begin(
        self, held: ShelvedEnvironment, session: WorkerSession, task: Task, seed: int, *, streamed: bool
    ) -> tuple[Open, dict[str, Any]]:
        """Open a session; return it with what its reset returned. Raises Refused if there is no room."""
        if self.leaving:
            raise leaving()
        if len(self) >= self.limits.sessions:
            raise busy(
                f"{self.limits.sessions:,} sessions are open, the most there may be. Reset again later."
            )
        self._beginning += 1
        opened = Open(secrets.token_hex(8), held, session, streamed)
        try:
            began = await self.beside(lambda: session.reset(task, seed))
        except asyncio.CancelledError:
            self._let_go(opened)  # the world may be open already
            raise
        finally:
            self._beginning -= 1
        self._open[opened.id] = opened
        return opened, began

    async def ask(self, name: str, question: Mapping[str, Any]) -> Any:
        """Return a session's answer (`WorkerSession.answer`); it is closed if its caller goes away meanwhile."""
        opened = self.find(name)
        opened.asked += 1
        try:
            return await self.beside(lambda: opened.session.answer(question))
        except asyncio.CancelledError:
            self.free(name)
            raise
        finally:
            opened.asked -= 1
            opened.used = time.monotonic()

    async def beside(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do something in an environment, on the thread of the worlds; the caller is told the type and message of what it raises."""
        try:
            return await self._worlds.ask(work)
        except (Refused, asyncio.CancelledError):
            raise
        except WorkerLost as lost:
            raise Refused(
                "DATA_LOSS" if lost.blamed else "UNAVAILABLE", f"The world is lost: {lost}"
            ) from None
        except BaseException as error:  # noqa: BLE001 - the one boundary where what a world raises becomes an answer
            raise Refused("ABORTED", ": ".join(error_form(error))) from None

    async def now(self, work: Callable[[], T]) -> T:
        """Do something that is not async in an environment; see `beside`."""

        async def done() -> T:
            return work()

        return await self.beside(done)

    def find(self, name: str) -> Open:
        """Return an open session; raises Refused for an unknown one."""
        if name not in self._open:
            raise Refused(
                "NOT_FOUND",
                "There is no such session: it was closed, had no call for too long, or was never begun.",
            )
        return self._open[name]

    async def close(self, name: str) -> None:
        """Close a session and return when its world is closed."""
        opened = self.find(name)
        del self._open[name]
        await self.beside(opened.session.close)

    def playing(self, held: ShelvedEnvironment) -> bool:
        """Return whether a session plays an environment."""
        return any(opened.held is held for opened in self._open.values())

    def free(self, name: str) -> None:
        """Close a session, if it is open, without waiting."""
        opened = self._open.pop(name, None)
        if opened is not None:
            self._let_go(opened)

    async def expire(self) -> None:
        """Close, again and again, the sessions that have had no call for too long."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            late = time.monotonic() - self.limits.idle_seconds
            for opened in list(self._open.values()):
                if not opened.streamed and not opened.asked and opened.used < late:
                    self.free(opened.id)

    def close_all(self, seconds: float) -> None:
        """Close every session and wait up to `seconds` for their worlds; any thread may call it once the server has ended."""
        for name in list(self._open):
            self.free(name)
        wait(self._closing, seconds)

    def _let_go(self, opened: Open) -> None:
        """Close a world without waiting; what it raises is dropped."""
        closing = self._worlds.begin(opened.session.close)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
