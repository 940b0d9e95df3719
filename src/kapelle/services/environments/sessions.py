"""The open sessions of an environment server: bounded in number, each freed by whoever opened it or when nobody asks."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kapelle.rollout.workers.session import Session
from kapelle.services.environments.shelf import Held
from kapelle.services.grpc.refusals import Refused, busy, leaving, wrong
from kapelle.services.policy.engine_thread import EngineThread
from kapelle.wire import environment_v1_pb2 as pb

# -------- The moves of one session, each made once however often it is sent


class Moves:
    """What a session was asked and answered last; for one event loop.

    A caller whose connection breaks cannot know whether its move was made. Sent again with its number, it is answered
    as the first time, an error included; the world does not see it again.
    """

    def __init__(self) -> None:
        self._made = 0
        self._asked = b""
        self._answer: _Once | None = None
        self._outcome: tuple[int, _Once] | None = None

    async def act(
        self, asked: pb.ActRequest, make: Callable[[], Coroutine[Any, Any, pb.ActReply]]
    ) -> pb.ActReply:
        """Make a move, or return what it brought when it was made; Refused where its number is neither."""
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
    """Work that is done once, for all who ask for its result; broken off when none of them is left to wait."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._work = asyncio.create_task(work())
        self._work.add_done_callback(_looked_at)
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


def _looked_at(work: asyncio.Task[Any]) -> None:
    """Take note of an error that nobody waits for any more, or Python would print it."""
    if not work.cancelled():
        work.exception()


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How many worlds there may be and for how long."""

    sessions: int = 4096
    """Open at once."""
    idle_seconds: float = 600.0
    """After which a session that no stream holds is closed when nobody asks about it."""
    call_seconds: float = 600.0
    """The most that one call of a world may take."""


@dataclass(eq=False)
class Open:
    """An open session."""

    id: str
    held: Held
    session: Session
    streamed: bool
    """Whether a stream holds it, and so ends it."""
    used: float = field(default_factory=time.monotonic)
    asked: int = 0
    """Questions under way."""
    moves: Moves = field(default_factory=Moves)


class Sessions:
    """Sessions by their id; for one event loop. Worlds live on a thread of their own."""

    def __init__(self, worlds: EngineThread, limits: SessionLimits) -> None:
        self.limits = limits
        self._worlds = worlds
        self._open: dict[str, Open] = {}
        self._closing: set[Future[None]] = set()
        self._beginning = 0
        self.leaving = False
        """Whether no more may begin."""

    def __len__(self) -> int:
        return len(self._open) + self._beginning

    async def begin(
        self, held: Held, session: Session, work: Callable[[], Awaitable[T]], *, streamed: bool
    ) -> tuple[Open, T]:
        """Open a session by `work`; raises Refused where there is no room."""
        if self.leaving:
            raise leaving()
        if len(self) >= self.limits.sessions:
            raise busy(
                f"{self.limits.sessions:,} sessions are open, the most there may be. Reset again later."
            )
        self._beginning += 1
        opened = Open(secrets.token_hex(8), held, session, streamed)
        try:
            result = await self.beside(work)
        except asyncio.CancelledError:
            self._let_go(opened)  # the world may be open already
            raise
        finally:
            self._beginning -= 1
        self._open[opened.id] = opened
        return opened, result

    async def ask(self, name: str, work: Callable[[Session], Awaitable[T]]) -> T:
        """Let a session do something; one whose caller goes away meanwhile is closed."""
        opened = self.find(name)
        opened.asked += 1
        try:
            return await self.beside(lambda: work(opened.session))
        except asyncio.CancelledError:
            self.free(name)
            raise
        finally:
            opened.asked -= 1
            opened.used = time.monotonic()

    async def beside(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something on the thread of the worlds."""

        async def begun() -> T:
            return await work()

        return await self._worlds.ask(begun)

    def find(self, name: str) -> Open:
        """Return an open session; raises Refused for an unknown one."""
        if name not in self._open:
            raise Refused(
                "NOT_FOUND",
                "There is no such session: it was closed, nobody asked about it for long, or never begun.",
            )
        return self._open[name]

    async def close(self, name: str) -> None:
        """Close a session and return when its world is closed."""
        opened = self.find(name)
        del self._open[name]
        await self.beside(opened.session.close)

    def playing(self, held: Held) -> bool:
        """Return whether a session plays an environment."""
        return any(opened.held is held for opened in self._open.values())

    def free(self, name: str) -> None:
        """Close a session, if it is open, without waiting."""
        opened = self._open.pop(name, None)
        if opened is not None:
            self._let_go(opened)

    def expire(self) -> None:
        """Close the sessions that nobody has asked about for too long."""
        late = time.monotonic() - self.limits.idle_seconds
        for opened in list(self._open.values()):
            if not opened.streamed and not opened.asked and opened.used < late:
                self.free(opened.id)

    async def over(self) -> None:
        """Return when no session is open."""
        while len(self):  # noqa: ASYNC110 - several places end sessions
            await asyncio.sleep(0.05)

    def close_all(self, seconds: float) -> None:
        """Close every session, and wait so long for their worlds; when the server has ended, from any thread."""
        for name in list(self._open):
            self.free(name)
        wait(self._closing, seconds)

    def _let_go(self, opened: Open) -> None:
        """Close a world without waiting; what it raises is nobody's any more."""
        closing = self._worlds.begin(opened.session.close)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
