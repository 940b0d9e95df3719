"""A session: one world as somebody elsewhere plays it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kapelle.environment import Environment
from kapelle.environments.bounded_worlds import BoundedWorld
from kapelle.rollout.outcomes import payments, plain_outcome, share, text
from kapelle.rollout.workers.messages import error_form, outcome_form
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.interrupts import listed
from kapelle.types import Task

OpenWorld = Callable[[Environment, Task, Sequence[str], int, Patience], Awaitable[BoundedWorld]]
"""Opens the world of one episode; see `bounded_worlds.open_world`."""


class Session:
    """One world, and what its agents were shown last."""

    def __init__(
        self, opened: OpenWorld, environment: Environment, patience: Patience, agents: tuple[str, ...]
    ) -> None:
        """Take how worlds are opened, what of, the limits of its calls, and the names in seat order."""
        self._opened, self._environment, self.patience, self._agents = opened, environment, patience, agents
        self._world: BoundedWorld | None = None
        self.shown: dict[str, Mapping[str, Any]] = {}
        """What each agent sees, as of the last view."""
        self._calls: list[asyncio.Task[Any] | None] = []

    @property
    def world(self) -> BoundedWorld:
        """The world, once it is open."""
        assert self._world is not None, "a world is reset first"
        return self._world

    async def reset(self, task: Task, seed: int) -> dict[str, Any]:
        """Open the world; return whether it can score, and what is seen."""
        with listed(asyncio.current_task(), self._calls):
            self._world = await self._opened(self._environment, task, self._agents, seed, self.patience)
        return {"scorable": self.world.scorable, "view": self.view()}

    async def answer(self, question: Mapping[str, Any]) -> Any:
        """Answer `act`, `score` or `outcome`; see `messages.py`."""
        with listed(asyncio.current_task(), self._calls):
            if (most := question.get("allow_answers")) is not None:
                self.world.allow_answers(most)
            if question["call"] == "act":
                paid = await self.world.step(question["actions"], question["final"])
                return {"rewards": payments(paid, self._agents), "view": self.view()}
            if question["call"] == "score":
                agent = question["agent"]
                score = await self.world.score(agent, question["text"])
                return share(score, f"The world's score of a text of '{agent}'")
            outcome = await self.world.outcome()
            return outcome_form(plain_outcome(outcome, payments(outcome.rewards, self._agents)))

    def view(self) -> dict[str, Any]:
        """Return who may move and what agents are shown, where that has changed; errors as what asking would raise."""
        shown = {
            agent: _asked(lambda a=agent: text(self.world.observe(a), f"What the world shows '{a}'"))  # type: ignore[misc]
            for agent in self._agents
        }
        changed = {agent: each for agent, each in shown.items() if self.shown.get(agent) != each}
        self.shown.update(shown)
        return {"movers": _asked(lambda: tuple(self.world.movers())), "shown": changed}

    async def close(self) -> None:
        """Break off what the world is doing and close it."""
        under_way = [task for task in self._calls if task is not None]
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)
        if self._world is not None:
            await self._world.close()


def _asked(ask: Callable[[], object]) -> dict[str, Any]:
    try:
        return {"value": ask()}
    except BaseException as error:  # noqa: BLE001 - raised where it is asked for
        return {"error": error_form(error)}
