"""A pool of processes that hold the worlds of episodes (`episode.environment_workers`), and such a world as seen from here."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from typing import Any

from kapelle.environment import Environment, Outcome
from kapelle.environments.bounded_worlds import BoundedWorld
from kapelle.environments.elsewhere import ElsewhereWorld, WorkerLost
from kapelle.errors import EngineError
from kapelle.rollout.workers.messages import VERSION, pack, task_form
from kapelle.rollout.workers.process import Exchange, HeldHere, Hold, Worker
from kapelle.runtime.closing import Closing
from kapelle.runtime.deadlines import Patience, within
from kapelle.runtime.watchdog import UNBREAKABLE, GaveUp
from kapelle.setup.environment_forms import environment_form
from kapelle.types import Task

DEATHS = 20
"""Workers in a row that may die before they have answered anything; then the run stops."""


class EnvironmentWorkers(Closing):
    """Opens worlds in worker processes, each in the one with the fewest; any event loop may ask.

    Processes start when first needed, and one that has died is started anew when the next world is opened. They end when
    the pool is closed or collected, or when this process ends.
    """

    def __init__(
        self, environment: Environment, size: int, patience: Patience, hold: Hold = HeldHere
    ) -> None:
        """Take the environment, the number of processes, the time limits of calls, and what starts a process.

        Raises ConfigError for an environment that another process cannot make.
        """
        assert size >= 1, "a pool has a process at least"
        self.size = size
        self._patience, self._hold = patience, hold
        serve = {
            "id": 0,
            "call": "serve",
            "version": VERSION,
            "environment": environment_form(environment),
            "patience": asdict(patience),
        }
        self._begin = pack(serve)
        self._workers: list[Worker | None] = [None] * size
        self._exchange: Exchange | None = None
        self._numbers = count(1)
        self._starting = threading.Lock()
        self._end: weakref.finalize[..., Any] | None = None

    @property
    def running(self) -> list[Worker]:
        """The processes that have been started and not ended."""
        return [worker for worker in self._workers if worker is not None and worker.lost is None]

    def close(self) -> None:
        """End all processes; a world that is opened later starts new ones."""
        with self._starting:
            if self._end is not None:
                self._end()
            self._workers, self._exchange, self._end = [None] * self.size, None, None

    async def open_world(
        self, environment: Environment, task: Task, agents: Sequence[str], seed: int, patience: Patience
    ) -> BoundedWorld:
        """Open the world of one episode in a worker; see `bounded_worlds.open_world`.

        Raises WorkerLost if the worker ends meanwhile, and EngineError if workers cannot begin or die again and again.
        """
        worker = self._least_busy()
        world = WorkerWorld(self, worker, next(self._numbers), environment.name, patience)
        await world.reset(task, tuple(agents), seed)
        return world

    def finished(self, worker: Worker) -> None:
        """Note that a world has been closed."""
        worker.sessions -= 1

    def _least_busy(self) -> Worker:
        with self._starting:
            exchange = self._exchange
            if exchange is None:
                exchange = self._exchange = Exchange(self._patience.environment + UNBREAKABLE)
                self._end = weakref.finalize(self, _end_own, exchange, os.getpid())
            if exchange.deaths >= DEATHS:
                raise EngineError(self._dying(exchange.deaths))
            busy = [0 if w is None or w.lost is not None else w.sessions for w in self._workers]
            place = busy.index(min(busy))
            worker = self._workers[place]
            if worker is None or worker.lost is not None:
                worker = self._workers[place] = Worker(self._begin, self._hold(place))
                exchange.add(worker)
            worker.sessions += 1
            return worker

    def _dying(self, deaths: int) -> str:
        how = next((worker.lost for worker in self._workers if worker is not None and worker.lost), "it died")
        return (
            f"{deaths} environment workers in a row have died before they answered anything; last, {how}. Look above for "
            "what they wrote, and check the machine's memory. `episode.environment_workers: 0` plays in this process."
        )

    async def ask(self, worker: Worker, session: int, question: Mapping[str, Any]) -> Any:
        """Return a worker's answer; raises what it raised, WorkerLost, or EngineError if it could not begin."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        number = worker.put({**question, "session": session}, (loop, future, session))
        if worker.outgoing and self._exchange is not None:
            self._exchange.ring()
        try:
            return await future
        finally:
            worker.waiting.pop(number, None)


def _end_own(exchange: Exchange, owner: int) -> None:
    # A fork of this process inherits the pool and not its workers.
    if os.getpid() == owner:
        exchange.close()


class WorkerWorld(ElsewhereWorld):
    """A world in a worker; the worker bounds each call of the environment, here only the whole episode's limit holds."""

    def __init__(
        self, pool: EnvironmentWorkers, worker: Worker, session: int, name: str, patience: Patience
    ) -> None:
        """Take the place of the world: its worker and the number of its session."""
        super().__init__(name, patience)
        self._pool, self._worker, self._session = pool, worker, session
        self._allowed: dict[str, int] = {}
        """What is still to be passed on with the next question."""

    @property
    def lost(self) -> WorkerLost | None:
        """How the world was lost with its worker; None while that lives."""
        try:
            self._worker.check(self._session)
        except WorkerLost as lost:
            return lost
        except EngineError:
            return None
        return None

    async def reset(self, task: Task, agents: tuple[str, ...], seed: int) -> None:
        """Open the world; nothing is left behind when that fails."""
        question = {"call": "reset", "task": task_form(task), "agents": agents, "seed": seed}
        try:
            answer = await self._ask("start", question)
        except (asyncio.CancelledError, GaveUp):  # the worker may still open it
            with suppress(GaveUp):  # what it was asked for it does none the less
                await self.close()
            raise
        except BaseException:
            self._pool.finished(self._worker)
            raise
        self._scorable = answer["scorable"]
        self._view.take(answer["view"])

    async def outcome(self) -> Outcome:
        """See `environment.World`."""
        return Outcome(**await self._ask("outcome", {"call": "outcome"}))

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """See `environment.World`."""
        answer = await self._ask("step", {"call": "act", "actions": actions, "final": final})
        self._view.take(answer["view"])
        rewards: Mapping[str, float] = answer["rewards"]
        return rewards

    async def score(self, agent: str, text: str) -> float:
        """See `environment.Scorable`."""
        return float(await self._ask("score", {"call": "score", "agent": agent, "text": text}))

    def allow_answers(self, most: int) -> None:
        """See `environment.Retriable`; the worker hears of it with the first step."""
        self._allowed = {"allow_answers": most}

    async def close(self) -> None:
        """See `environment.World`; what is lost with its worker needs no closing."""
        try:
            if self.lost is None:
                await self._ask("close", {"call": "close"})
        except WorkerLost:
            pass
        finally:
            self._pool.finished(self._worker)

    async def _ask(self, method: str, question: Mapping[str, Any]) -> Any:
        asked = {**question, **self._allowed}
        self._allowed = {}
        answer = self._pool.ask(self._worker, self._session, asked)
        return await within(self._what(method), "episode", self._patience.episode, answer)
