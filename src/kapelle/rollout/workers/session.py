"""A session: one world, as another process plays it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from kapelle.environment import Environment, RemoteWorld
from kapelle.errors import EpisodeError
from kapelle.rollout.bounded_worlds import BoundedWorld
from kapelle.rollout.outcomes import payments, plain_outcome, said, share, text
from kapelle.runs.episode_json import decode, encode
from kapelle.runtime.deadlines import Patience, patience_here
from kapelle.runtime.interrupts import listed
from kapelle.types import Cast, Json, Message, Task

# -------- The messages between a process that plays and one that holds worlds: their vocabulary, frames and values
#
# A *session* is one world, from its reset to its close. The player asks, the worker answers each question once, in any order;
# questions of a session begin in the order in which they were asked:
#
#     serve     the environment's settings, first of all         → nothing
#     reset     task, agents, seed: open a world                 → view, scorable
#     act       actions, final                                   → rewards, view
#     observe   (`kapelle serve environments` alone asks it)     → view, with all that is shown
#     score     agent, text                                      → score
#     outcome                                                    → outcome
#     close     whatever the world is doing                      → nothing
#
# A *view* is all that may be asked of a world without waiting: who may move, and what each agent is shown, where that has changed.
#
# A frame is its length in four bytes and then JSON in ASCII, which loses nothing (`runs/episode_json.py`). No code travels.

VERSION = 1
"""Of this vocabulary; both sides must speak the same."""
LENGTH = 4
"""Bytes of a frame's length."""
LARGEST = 1 << 30
"""Most bytes of a frame."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as a frame; EpisodeError for one that JSON cannot hold or that is too large."""
    try:
        body = json.dumps(encode(message, "message"), separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise EpisodeError(
            f"It cannot be passed to or from another process: {error}. Let the environment put only text, numbers, lists "
            "and mappings into its tasks, or set `episode.environment_workers: 0`."
        ) from error
    if len(body) > LARGEST:
        raise EpisodeError(
            f"A message of {len(body):,} bytes is too large to pass on; {LARGEST:,} are the most."
        )
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
            yield decode(json.loads(body))


def task_form(task: Task) -> dict[str, Json]:
    """Return a task as plain values."""
    cast: dict[str, Json] = {agent: [each.policy, each.player] for agent, each in task.cast.items()}
    return {
        "id": task.id,
        "question": task.question,
        "data": task.data,
        "part": task.part,
        "cast": cast,
        "system": task.system,
        "messages": [[[m.role, m.content, m.structured] for m in read] for read in task.messages],
        "rendered": task.rendered,
    }


def task_from(form: Mapping[str, Any]) -> Task:
    """Return the task that `task_form` was given."""
    cast = {agent: Cast(*each) for agent, each in form["cast"].items()}
    messages = tuple(
        tuple(Message(role, content, structured=structured) for role, content, structured in read)
        for read in form["messages"]
    )
    return Task(**{**form, "cast": cast, "messages": messages})


def error_form(error: BaseException) -> list[str]:
    """Return an error as its name and message."""
    return [type(error).__name__, said(error)]


OpenWorld = Callable[[Environment, Task, Sequence[str], int, Patience], Awaitable[BoundedWorld | RemoteWorld]]
"""Opens the world of one episode; see `bounded_worlds.open_world`."""


class WorkerSession:
    """One world, and what its agents were shown last."""

    def __init__(
        self, opened: OpenWorld, environment: Environment, patience: Patience, agents: tuple[str, ...]
    ) -> None:
        """Take how worlds are opened, what of, the limits of its calls, and the names in seat order."""
        self._opened, self._environment, self.patience, self._agents = opened, environment, patience, agents
        self._world: BoundedWorld | RemoteWorld | None = None
        self.shown: dict[str, Mapping[str, Any]] = {}
        """What each agent sees, as of the last view."""
        self._calls: list[asyncio.Task[Any] | None] = []

    @property
    def world(self) -> BoundedWorld | RemoteWorld:
        """The world, once it is open."""
        assert self._world is not None, "a world is reset first"
        return self._world

    async def reset(self, task: Task, seed: int) -> dict[str, Any]:
        """Open the world; return whether it can score, and what is seen."""
        patience_here.set(self.patience)
        with listed(asyncio.current_task(), self._calls):
            self._world = await self._opened(self._environment, task, self._agents, seed, self.patience)
        return {"scorable": self.world.scorable, "view": self.view()}

    async def answer(self, question: Mapping[str, Any]) -> Any:
        """Answer `act`, `observe`, `score` or `outcome`; see above."""
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
                return share(score, f"The world's score of a text of '{agent}'")
            found = await self.world.outcome()
            outcome = plain_outcome(found, payments(found.rewards, self._agents))
            return {field.name: getattr(outcome, field.name) for field in fields(outcome)}

    def view(self) -> dict[str, Any]:
        """Return who may move and what agents are shown, where that has changed; an error stands for what asking would raise."""
        shown = {
            agent: _asked(lambda who: text(self.world.observe(who), f"What the world shows '{who}'"), agent)
            for agent in self._agents
        }
        for agent, each in shown.items():
            if "value" in each and (moves := self.world.legal(agent)):
                shown[agent] = {**each, "legal": list(moves)}
        changed = {agent: each for agent, each in shown.items() if self.shown.get(agent) != each}
        self.shown.update(shown)
        return {"movers": _asked(lambda: tuple(self.world.movers())), "shown": changed}

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


def _asked(ask: Callable[..., object], *given: object) -> dict[str, Any]:
    try:
        return {"value": ask(*given)}
    except BaseException as error:  # noqa: BLE001 - raised where it is asked for
        return {"error": error_form(error)}
