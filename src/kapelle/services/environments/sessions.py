"""The open sessions of an environment server: bounded in number, each freed by whoever opened it or when nobody asks."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TypeVar

from kapelle.rollout.workers.session import Session
from kapelle.services.environments.moves import Moves
from kapelle.services.environments.shelf import Held
from kapelle.services.grpc.refusals import Refused, busy, leaving
from kapelle.services.policy.engine_thread import EngineThread

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
