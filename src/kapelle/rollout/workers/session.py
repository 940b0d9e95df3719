"""A session: one world, as another process plays it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from kapelle.environment import Environment, RemoteWorld
from kapelle.rollout.bounded_worlds import BoundedWorld
from kapelle.rollout.outcomes import payments, plain_outcome, said, share, text
from kapelle.runtime.deadlines import Patience, patience_here
from kapelle.runtime.interrupts import listed
from kapelle.runtime.wire.worlds import from_text, to_text
from kapelle.types import Task

# -------- The transport of the protocol (`wire/worlds.py`) between a process and its worker
#
# A frame is its length in four bytes and then a message as JSON.

LENGTH = 4
"""Bytes of a frame's length."""
LARGEST = 1 << 30
"""Most bytes of a frame."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as a frame; EpisodeError for one that JSON cannot hold or that is too large."""
    body = to_text(message, LARGEST).encode("ascii")
    return len(body).to_bytes(LENGTH, "big") + body


class Frames:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._arrived = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that are complete with these bytes; ValueError for what is no message."""
        self._arrived += data
        while len(self._arrived) >= LENGTH:
            end = LENGTH + int.from_bytes(self._arrived[:LENGTH], "big")
            if end > LARGEST + LENGTH:
                raise ValueError(f"a frame of {end:,} bytes")
            if len(self._arrived) < end:
                return
            body = bytes(self._arrived[LENGTH:end])
            del self._arrived[:end]
            yield from_text(body)


def error_form(error: BaseException) -> list[str]:
    """Return an error as its name and message."""
    return [type(error).__name__, said(error)]


OpenWorld = Callable[[Environment, Task, Sequence[str], int, Patience], Awaitable[BoundedWorld | RemoteWorld]]
"""Opens the world of one episode; see `bounded_worlds.open_world`."""


Run = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Awaitable[Any]]
"""Runs a coroutine and returns its result."""


class WorkerSession:
    """One world, and what its agents were shown last."""

    def __init__(
        self, opened: OpenWorld, environment: Environment, patience: Patience, agents: Sequence[str]
    ) -> None:
        """Take how worlds are opened, what of, the limits of its calls, and the names in seat order."""
        self._opened, self.environment, self.patience, self._agents = opened, environment, patience, agents
        self._world: BoundedWorld | RemoteWorld | None = None
        self.shown: dict[str, Mapping[str, Any]] = {}
        """What each agent sees, as of the last view."""
        self._calls: list[asyncio.Task[Any] | None] = []

    @property
    def begun(self) -> bool:
        """Whether the world is open."""
        return self._world is not None

    @property
    def world(self) -> BoundedWorld | RemoteWorld:
        """The world, once it is open."""
        assert self._world is not None, "a world is reset first"
        return self._world

    async def reset(self, task: Task, seed: int) -> dict[str, Any]:
        """Open the world; return whether it can score, and what is seen."""
        patience_here.set(self.patience)
        with listed(asyncio.current_task(), self._calls):
            self._world = await self._opened(self.environment, task, self._agents, seed, self.patience)
        return {"scorable": self.world.scorable, "view": self.view()}

    async def answer(self, question: Mapping[str, Any]) -> Any:
        """Answer `act`, `observe`, `score` or `outcome`."""
        patience_here.set(self.patience)
        with listed(asyncio.current_task(), self._calls):
            if (most := question.get("allow_answers")) is not None:
                self.world.allow_answers(most)
            if question["call"] == "act":
                paid = await self.world.step(question["actions"], question["final"])
                return {"rewards": payments(paid, self._agents), "view": self.view()}
            if question["call"] == "observe":
                return {**self.view(), "shown": dict(self.shown)}
            if question["call"] == "score":
                agent = question["agent"]
                score = await self.world.score(agent, question["text"])
                return share(score, f"The environment's score of a text of '{agent}'")
            found = await self.world.outcome()
            outcome = plain_outcome(found, payments(found.rewards, self._agents))
            return {field.name: getattr(outcome, field.name) for field in fields(outcome)}

    def view(self) -> dict[str, Any]:
        """Return who may move and what agents are shown, where that has changed; an error stands for what asking would raise."""
        shown = {
            agent: _asked(lambda who: text(self.world.observe(who), f"The observation of '{who}'"), agent)
            for agent in self._agents
        }
        for agent, each in shown.items():
            if "value" in each and (moves := self.world.legal(agent)):
                shown[agent] = {**each, "legal": list(moves)}
        changed = {agent: each for agent, each in shown.items() if self.shown.get(agent) != each}
        self.shown.update(shown)
        return {"movers": _asked(lambda: list(self.world.movers())), "shown": changed}

    async def close(self) -> None:
        """Cancel what the world is doing and close it."""
        patience_here.set(self.patience)
        under_way = [task for task in self._calls if task is not None]
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)
        if self._world is not None:
            await self._world.close()


class OpenSessions:
    """The open sessions of one connection, by the numbers that the player has given them."""

    def __init__(self, run: Run = lambda work: work()) -> None:
        """`run` runs what a session does, perhaps on another thread."""
        self.open: dict[int, WorkerSession] = {}
        self._run = run

    async def begin(self, number: int, session: WorkerSession, task: Task, seed: int) -> Any:
        """Open a session's world and return what `reset` answers; nothing is left behind when that fails."""
        self.open[number] = session
        try:
            return await self._run(lambda: session.reset(task, seed))
        except BaseException:
            self.open.pop(number, None)
            raise

    async def answer(self, number: int, question: Mapping[str, Any]) -> Any:
        """Answer a question about an open session; a session that could not begin is closed already."""
        if question["call"] == "close":
            session = self.open.pop(number, None)
            return None if session is None else await self._run(session.close)
        return await self._run(lambda: self.open[number].answer(question))


def _asked(ask: Callable[..., object], *given: object) -> dict[str, Any]:
    try:
        return {"value": ask(*given)}
    except BaseException as error:  # noqa: BLE001 - raised where it is asked for
        return {"error": error_form(error)}
