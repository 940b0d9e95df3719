"""Worlds whose calls end in time: in the thread of the event loop, or where they block, in workers of their own.

A world that never waits for anything but its own arithmetic is called where it is, in the order of the program. One
that waits for other programs without `await` declares it (`blocking = True` on its environment): it would hold up all
other episodes. Each of its worlds then has a thread of its own from its start to its end, so that many wait side by
side; a thread that does not return in time is left behind with its world.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar, cast

from kapelle.environment import Environment, Outcome, Retriable, Scorable, World, offers
from kapelle.errors import DataError, EpisodeError
from kapelle.runtime.deadlines import GaveUp, Patience, call, leave_behind, raise_in, watching_loop, within
from kapelle.types import Split, Task

T = TypeVar("T")

WORKERS = 256
"""Worlds of environments that block, alive at once; further episodes wait before they begin (`rollout/play.py`),
and one that needs more by itself has them."""


def task_of(environment: Environment, split: Split, index: int) -> Task:
    """Return a task of an environment; DataError when it takes longer than `environment.timeout`."""
    seconds = float(getattr(environment, "timeout", Patience.environment))
    what = f"`task` of environment '{getattr(environment, 'name', type(environment).__name__)}'"
    try:
        return call(what, "environment", seconds, environment.task, split, index)
    except GaveUp as error:
        raise DataError(
            f"{error} It was asked for task {index} of split '{split}'. Fix it, or raise that limit."
        ) from None


class OpensItself:
    """An environment whose worlds live elsewhere: it opens them by awaiting."""

    async def open_world(
        self, task: Task, agents: Sequence[str], seed: int, patience: Patience
    ) -> BoundedWorld:
        """Open the world of one episode."""
        raise NotImplementedError


async def open_world(
    environment: Environment, task: Task, agents: Sequence[str], seed: int, patience: Patience
) -> BoundedWorld:
    """Open the world of one episode; in a worker where the environment declares that it blocks."""
    if offers(environment, OpensItself):
        return await environment.open_world(task, agents, seed, patience)
    kind = _WorkerWorld if getattr(environment, "blocking", False) else BoundedWorld
    world = kind(environment.name, patience)
    await world.open(lambda: environment.start(task, agents, seed))
    return world


class BrokenContract(EpisodeError):
    """A world lacks a method, or has one that is `async` where it must not be, or the other way round."""


def _checked(world: object, name: str) -> Any:
    """Return what `start` has returned; BrokenContract where that is no world."""
    if isinstance(world, Coroutine):
        world.close()
        raise BrokenContract(
            f"`start` of environment '{name}' is async. Write `def start`: it returns the world."
        )
    if isinstance(world, type):
        raise BrokenContract(
            f"`start` of environment '{name}' returns the class {world.__name__} itself; return an instance of it."
        )
    missing = [method for method in _METHODS if not callable(getattr(world, method, None))]
    if missing:
        raise BrokenContract(
            f"`start` of environment '{name}' returns a {type(world).__name__}, which has no "
            f"`{'`, no `'.join(missing)}`. A world has all of {', '.join(_METHODS)} (`kapelle.World`)."
        )
    return world


_METHODS = ("observe", "movers", "step", "outcome", "close")


class BoundedWorld:
    """A world, called where it is; every call raises GaveUp when it takes too long."""

    inner: World

    def __init__(self, name: str, patience: Patience) -> None:
        """Take the environment's name, for messages, and how long its calls may take."""
        self._name, self._patience = name, patience

    @classmethod
    def around(cls, world: World | BoundedWorld, name: str, patience: Patience) -> BoundedWorld:
        """Return a world that is open already, bounded; one that is bounded already as it is."""
        if isinstance(world, BoundedWorld):
            return world
        made = cls(name, patience)
        made.inner = world
        return made

    async def open(self, start: Callable[[], World]) -> None:
        """Open the world; nothing is left behind when that fails."""
        self.inner = _checked(self._opened(start), self._name)

    def _opened(self, start: Callable[[], World]) -> object:
        return call(self._what("start"), "environment", self._patience.environment, start)

    def observe(self, agent: str) -> str:
        """See `environment.World`."""
        return self._now("observe", self.inner.observe, agent)

    def movers(self) -> tuple[str, ...]:
        """See `environment.World`."""
        return self._now("movers", self.inner.movers)

    async def outcome(self) -> Outcome:
        """See `environment.World`."""
        return self._now("outcome", self.inner.outcome)

    def step(self, actions: Mapping[str, str], final: str | None = None) -> Awaitable[Mapping[str, float]]:
        """See `environment.World`."""
        return self._waiting("step", lambda: self.inner.step(actions, final))

    @property
    def scorable(self) -> bool:
        """Whether it can score a text before the episode is over; see `environment.Scorable`."""
        return isinstance(self.inner, Scorable)

    def score(self, agent: str, text: str) -> Awaitable[float]:
        """See `environment.Scorable`."""
        world = cast("Scorable", self.inner)
        return self._waiting("score", lambda: world.score(agent, text), "grader", self._patience.grader)

    def allow_answers(self, most: int) -> None:
        """See `environment.Retriable`; worlds that are not stay as they are."""
        if isinstance(self.inner, Retriable):
            self._now("allow_answers", self.inner.allow_answers, most)

    def close(self) -> Awaitable[None]:
        """See `environment.World`."""
        return self._waiting("close", self.inner.close)

    def _what(self, method: str) -> str:
        return f"`{method}` of environment '{self._name}'"

    def _now(self, method: str, work: Callable[..., T], *given: Any) -> T:
        found = call(self._what(method), "environment", self._patience.environment, work, *given)
        if isinstance(found, Coroutine):
            found.close()
            raise BrokenContract(
                f"{self._what(method)} is async. Write `def {method}`: its result is needed at once."
            )
        return found

    def _waiting(
        self,
        method: str,
        work: Callable[[], Awaitable[T]],
        kind: str = "environment",
        seconds: float | None = None,
    ) -> Awaitable[T]:
        most = self._patience.environment if seconds is None else seconds
        return within(self._what(method), kind, most, _started(work, self._what(method)))


async def _started(work: Callable[[], Awaitable[T]], what: str) -> T:
    made = work()
    if not isinstance(made, Awaitable):
        raise BrokenContract(
            f"{what} is not async: it returned {made!r:.60}. Write `async def {what.split('`')[1]}`."
        )
    return await made


class _WorkerWorld(BoundedWorld):
    """A world on a thread of its own, which is left behind when a call is given up."""

    async def open(self, start: Callable[[], World]) -> None:
        self._worker = _Worker()
        try:
            self.inner = _checked(await self._waiting("start", _at_once(start)), self._name)
        except BaseException:
            self._worker.end()
            raise

    def close(self) -> Awaitable[None]:
        return self._closing()

    async def _closing(self) -> None:
        try:
            if not self._worker.given_up:
                await self._waiting("close", self.inner.close)
        finally:
            self._worker.end()

    def _now(self, method: str, work: Callable[..., T], *given: Any) -> T:
        # The program asks for this without `await`: it waits here, and can be broken off here.
        future = self._worker.submit(_at_once(lambda: work(*given)))
        try:
            return super()._now(method, future.result)
        except GaveUp:
            self._worker.give_up()
            raise

    async def _waiting(
        self,
        method: str,
        work: Callable[[], Awaitable[T]],
        kind: str = "environment",
        seconds: float | None = None,
    ) -> T:
        future = self._worker.submit(work)
        try:
            return await super()._waiting(method, lambda: asyncio.wrap_future(future), kind, seconds)
        except (GaveUp, asyncio.CancelledError):
            if not future.done() or future.cancelled():
                self._worker.give_up()
            raise


def _at_once(work: Callable[[], T]) -> Callable[[], Awaitable[T]]:
    async def coroutine() -> T:
        return work()

    return coroutine


class _Worker:
    """A daemon thread with an event loop of its own."""

    def __init__(self) -> None:
        self.given_up = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kapelle-world", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with watching_loop(self._loop):
                self._loop.run_forever()
        except GaveUp:
            pass
        finally:
            for task in asyncio.all_tasks(self._loop):
                leave_behind(task)
            self._loop.close()

    def submit(self, work: Callable[[], Awaitable[T]]) -> Future[T]:
        """Start work on the thread."""
        if self.given_up:
            raise GaveUp("An earlier call of this world was given up, and its thread with it.")
        return asyncio.run_coroutine_threadsafe(
            cast("Coroutine[Any, Any, T]", _started(work, "`call` of a world")), self._loop
        )

    def give_up(self) -> None:
        """Leave the thread behind; where it computes, it is broken off."""
        if not self.given_up:
            self.given_up = True
            raise_in(self._thread.ident or 0, GaveUp("its world was given up"))
            self.end()

    def end(self) -> None:
        """Let the thread end when it has done what it is at."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
