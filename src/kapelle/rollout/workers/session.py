"""A session serves the calls of one episode state to another process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from kapelle.environment import Environment, RemoteState
from kapelle.rollout.bounded_states import BoundedState
from kapelle.rollout.outcomes import checked_rewards, message_of, plain_outcome, share, text
from kapelle.runtime.deadlines import Patience, patience_here
from kapelle.runtime.interrupts import listed
from kapelle.runtime.wire.worlds import from_text, to_text
from kapelle.types import Task

# -------- The transport of the protocol (`wire/worlds.py`): a frame is its length in four bytes, then a message as JSON

LENGTH = 4
"""Number of bytes that encode the length of a frame."""
LARGEST = 1 << 30
"""Maximum number of bytes of a frame."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as a frame. Raises EpisodeError if the message is too large or cannot be converted to JSON."""
    body = to_text(message, LARGEST).encode("ascii")
    return len(body).to_bytes(LENGTH, "big") + body


class Frames:
    """Splits the received bytes into messages."""

    def __init__(self) -> None:
        self._arrived = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that these bytes complete. Raises ValueError if a message is invalid."""
        self._arrived += data
        while len(self._arrived) >= LENGTH:
            end = LENGTH + int.from_bytes(self._arrived[:LENGTH], "big")
            if end > LARGEST + LENGTH:
                raise ValueError(f"a frame of {end:,} bytes exceeds the limit of {LARGEST:,}")
            if len(self._arrived) < end:
                return
            body = bytes(self._arrived[LENGTH:end])
            del self._arrived[:end]
            yield from_text(body)


def error_form(error: BaseException) -> list[str]:
    """Return the class name and the message of an error."""
    return [type(error).__name__, message_of(error)]


OpenState = Callable[[Environment, Task, Sequence[str], int, Patience], Awaitable[BoundedState | RemoteState]]
"""Function that opens the state of one episode; see `bounded_states.open_state`."""
Run = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Awaitable[Any]]
"""Function that runs a coroutine and returns its result."""


class WorkerSession:
    """One episode state in this process, with the last observations of its agents."""

    def __init__(
        self, opened: OpenState, environment: Environment, patience: Patience, agents: Sequence[str]
    ) -> None:
        """Set the function that opens the state, its environment, the time limits of its calls, and the agents in order."""
        self._opened, self.environment, self.patience, self._agents = opened, environment, patience, agents
        self._state: BoundedState | RemoteState | None = None
        self.shown: dict[str, Mapping[str, Any]] = {}
        """The last observation of each agent."""
        self._calls: list[asyncio.Task[Any] | None] = []

    @property
    def begun(self) -> bool:
        """Whether the episode state is open."""
        return self._state is not None

    @property
    def state(self) -> BoundedState | RemoteState:
        """The open episode state."""
        assert self._state is not None, "`reset` is called first"
        return self._state

    async def reset(self, task: Task, seed: int) -> dict[str, Any]:
        """Open the episode state, and return whether it can score texts and the observations of its agents."""
        patience_here.set(self.patience)
        with listed(asyncio.current_task(), self._calls):
            self._state = await self._opened(self.environment, task, self._agents, seed, self.patience)
        return {"scorable": self.state.scorable, "view": self.view()}

    async def answer(self, question: Mapping[str, Any]) -> Any:
        """Process a request of type `act`, `observe`, `score` or `outcome`, and return the result."""
        patience_here.set(self.patience)
        with listed(asyncio.current_task(), self._calls):
            if (most := question.get("allow_answers")) is not None:
                self.state.allow_answers(most)
            if question["call"] == "act":
                rewards = await self.state.step(question["actions"], question["final"])
                return {"rewards": checked_rewards(rewards, self._agents), "view": self.view()}
            if question["call"] == "observe":
                return {**self.view(), "shown": dict(self.shown)}
            if question["call"] == "score":
                agent = question["agent"]
                score = await self.state.score(agent, question["text"])
                return share(score, f"The environment's score of an answer of '{agent}'")
            found = await self.state.outcome()
            outcome = plain_outcome(found, checked_rewards(found.rewards, self._agents))
            return {field.name: getattr(outcome, field.name) for field in fields(outcome)}

    def view(self) -> dict[str, Any]:
        """Return the agents that may move, and the observations that have changed.

        If a value cannot be computed, the error is returned instead.
        """
        shown = {
            agent: _called(lambda who: text(self.state.observe(who), f"The observation of '{who}'"), agent)
            for agent in self._agents
        }
        for agent, each in shown.items():
            if "value" in each and (moves := self.state.legal(agent)):
                shown[agent] = {**each, "legal": list(moves)}
        changed = {agent: each for agent, each in shown.items() if self.shown.get(agent) != each}
        self.shown.update(shown)
        return {"movers": _called(lambda: list(self.state.movers())), "shown": changed}

    async def close(self) -> None:
        """Cancel running calls and close the episode state."""
        patience_here.set(self.patience)
        under_way = [task for task in self._calls if task is not None]
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)
        if self._state is not None:
            await self._state.close()


class OpenSessions:
    """The open sessions of one connection, keyed by their numbers."""

    def __init__(self, run: Run = lambda work: work()) -> None:
        """Set the function `run`, which executes the calls of a session, possibly on another thread."""
        self.open: dict[int, WorkerSession] = {}
        self._run = run

    async def begin(self, number: int, session: WorkerSession, task: Task, seed: int) -> Any:
        """Open a session and return the result of `reset`. If the session cannot be opened, it is removed."""
        self.open[number] = session
        try:
            return await self._run(lambda: session.reset(task, seed))
        except BaseException:
            self.open.pop(number, None)
            raise

    async def answer(self, number: int, question: Mapping[str, Any]) -> Any:
        """Process a request to an open session and return the result.

        If the session could not start, it is already closed.
        """
        if question["call"] == "close":
            session = self.open.pop(number, None)
            return None if session is None else await self._run(session.close)
        return await self._run(lambda: self.open[number].answer(question))


def _called(call: Callable[..., object], *given: object) -> dict[str, Any]:
    try:
        return {"value": call(*given)}
    except BaseException as error:  # noqa: BLE001 - raised in the other process
        return {"error": error_form(error)}
