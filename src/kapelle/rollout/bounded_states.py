"""Run the calls of episode states with time limits, either in the thread of the event loop or in a separate thread.

By default, calls run in the thread of the event loop. An environment that waits for other programs without `await` would block all
other episodes, so it must declare `blocking = True`. Each episode state of such an environment has its own thread. If a call exceeds
its time limit, the thread and the episode state are abandoned.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from types import CoroutineType
from typing import Any, TypeVar, cast

from kapelle.environment import (
    Environment,
    EpisodeState,
    KnowsMoves,
    OpensStates,
    Outcome,
    RemoteState,
    Resets,
    Retriable,
    Scorable,
    StateWithImages,
    offers,
)
from kapelle.errors import EpisodeError
from kapelle.runtime.deadlines import DeadlineExceeded, Limit, Patience, call, within
from kapelle.runtime.interrupts import left_behind
from kapelle.types import Image, Task

T = TypeVar("T")

WORKERS = 256
"""Maximum number of threads of blocking environments. Other episodes wait before they start (`rollout/setup.py`)."""
METHODS = ("observe", "movers", "step", "outcome", "close")
"""Names of the methods that every episode state must have."""
_RESULTS = frozenset({str, tuple, type(None), Outcome})
"""Common result types of methods that are not async. A lookup in this set is faster than `isinstance` with an abstract class."""


class BrokenContract(EpisodeError):
    """An episode state lacks a method, a method is async that must not be async, or a method is not async that must be async."""


async def open_state(
    environment: Environment, task: Task, agents: Sequence[str], seed: int, patience: Patience
) -> BoundedState | RemoteState:
    """Open the state of one episode. If the environment blocks, the state gets its own thread."""
    if offers(environment, OpensStates):
        return await environment.open_state(task, agents, seed, patience)
    state = (ThreadState if getattr(environment, "blocking", False) else BoundedState)(
        environment.name, patience
    )
    try:
        started = await state.start(environment.start, task, agents, seed)
        what = f"`start` of environment '{environment.name}'"
        if isinstance(started, Coroutine):
            started.close()
            raise BrokenContract(f"{what} is async. Write `def start` and return the state of the episode.")
        if isinstance(started, type):
            raise BrokenContract(
                f"{what} returns the class {started.__name__} itself. Return an instance of it."
            )
        kind: type = type(started)
        if not _whole(kind) and (
            missing := [method for method in METHODS if not callable(getattr(started, method, None))]
        ):
            raise BrokenContract(
                f"{what} returns a {type(started).__name__}, which has no `{'`, no `'.join(missing)}`. Define all methods of "
                f"an episode state: {', '.join(METHODS)} (`kapelle.EpisodeState`)."
            )
        state.inner = cast("EpisodeState", started)
        if isinstance(started, Resets):
            await state.reset()
    except BaseException:
        state.end()
        raise
    return state


@lru_cache(maxsize=64)
def _whole(kind: type) -> bool:
    """Return whether a class has every required method.

    If a method is missing, instances of the class may still have it.
    """
    return all(callable(getattr(kind, method, None)) for method in METHODS)


class BoundedState:
    """An episode state whose calls run in the current thread. A call that exceeds its time limit raises DeadlineExceeded."""

    inner: EpisodeState

    def __init__(self, name: str, patience: Patience) -> None:
        """Set the name of the environment, which is used in messages, and the time limits of its calls."""
        self._name, self._patience = name, patience

    async def start(self, start: Callable[..., EpisodeState], *given: Any) -> object:
        """Call `start` and return its result."""
        return self._now("start", start, *given)

    def end(self) -> None:
        """Release the thread after the start of the state has failed."""

    def observe(self, agent: str) -> str:
        """See `environment.EpisodeState`."""
        return self._now("observe", self.inner.observe, agent)

    def images(self, agent: str) -> Sequence[Image]:
        """See `environment.StateWithImages`. For other states, the result is empty."""
        if not isinstance(self.inner, StateWithImages):
            return ()
        found: Sequence[object] = self._now("images", self.inner.images, agent)
        if isinstance(found, list | tuple) and all(isinstance(each, Image) for each in found):
            return cast("Sequence[Image]", found)
        raise EpisodeError(
            f"`images` of environment '{self._name}' returns {found!r:.60}. Return a list of kapelle.Image, which is empty if there are no images."
        )

    def legal(self, agent: str) -> Sequence[str]:
        """See `environment.KnowsMoves`. For other states, the result is empty."""
        if not isinstance(self.inner, KnowsMoves):
            return ()
        found: Sequence[object] = self._now("legal", self.inner.legal, agent)
        if isinstance(found, list | tuple) and all(isinstance(each, str) and each for each in found):
            return cast("Sequence[str]", found)
        raise EpisodeError(
            f"`legal` of environment '{self._name}' returns {found!r:.60}. Return a list of strings, which is empty if it is not the agent's turn."
        )

    def movers(self) -> tuple[str, ...]:
        """See `environment.EpisodeState`."""
        return self._now("movers", self.inner.movers)

    async def outcome(self) -> Outcome:
        """See `environment.EpisodeState`."""
        return self._now("outcome", self.inner.outcome)

    def reset(self) -> Awaitable[None]:
        """See `environment.Resets`."""
        return self._waiting("reset", cast("Resets", self.inner).reset)

    def step(self, actions: Mapping[str, str], final: str | None = None) -> Awaitable[Mapping[str, float]]:
        """See `environment.EpisodeState`."""
        return self._waiting("step", self.inner.step, actions, final)

    @property
    def scorable(self) -> bool:
        """Whether a text can be scored before the end of the episode; see `environment.Scorable`."""
        return isinstance(self.inner, Scorable)

    def score(self, agent: str, text: str) -> Awaitable[float]:
        """See `environment.Scorable`."""
        return self._waiting("score", cast("Scorable", self.inner).score, agent, text)

    def allow_answers(self, most: int) -> None:
        """See `environment.Retriable`. For other states, this method has no effect."""
        if isinstance(self.inner, Retriable):
            self._now("allow_answers", self.inner.allow_answers, most)

    def close(self) -> Awaitable[None]:
        """See `environment.EpisodeState`."""
        return self._waiting("close", self.inner.close)

    def _now(self, method: str, work: Callable[..., T], *given: Any) -> T:
        """Call a method that is not async, and return its result."""
        what = f"`{method}` of environment '{self._name}'"
        found = self._called(what, self._patience.environment, work, *given)
        if type(found) not in _RESULTS and isinstance(found, Coroutine) and method != "start":
            found.close()
            raise BrokenContract(
                f"{what} is async. Write `def {method}`, because its result is needed at once."
            )
        return found

    def _called(self, what: str, seconds: float, work: Callable[..., T], *given: Any) -> T:
        return call(what, "environment", seconds, work, *given)

    def _waiting(self, method: str, work: Callable[..., Awaitable[T]], *given: Any) -> Awaitable[T]:
        """Call an async method, and return an awaitable of its result."""
        what = f"`{method}` of environment '{self._name}'"
        if method == "score":
            return within(what, "grader", self._patience.grader, _awaited(what, work, *given))
        return within(what, "environment", self._patience.environment, _awaited(what, work, *given))


async def _awaited(what: str, work: Callable[..., Awaitable[T]], *given: Any) -> T:
    made = work(*given)
    if type(made) is not CoroutineType and not isinstance(made, Awaitable):
        raise BrokenContract(
            f"{what} is not async: it returned {made!r:.60}. Write `async def {what.split('`')[1]}`."
        )
    return await made


class ThreadState(BoundedState):
    """An episode state with its own daemon thread and event loop. If a call exceeds its time limit, both are abandoned."""

    def __init__(self, name: str, patience: Patience) -> None:
        """Start the thread. Raises EpisodeError if too many threads were abandoned."""
        super().__init__(name, patience)
        if sum(isinstance(each, threading.Thread) and each.is_alive() for each in left_behind) >= WORKERS:
            raise EpisodeError(
                f"{WORKERS} abandoned calls of environments such as '{name}' are still running. Resume the run, and change the environment to limit "
                "the time of its calls."
            )
        self._given_up = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kapelle-episode", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            left_behind.extend(asyncio.all_tasks(self._loop))
            self._loop.close()

    async def start(self, start: Callable[..., EpisodeState], *given: Any) -> object:
        """Call `start` in the thread and return its result."""

        async def begin() -> object:
            return start(*given)

        return await self._waiting("start", begin)

    async def close(self) -> None:
        """See `environment.EpisodeState`. The thread also ends."""
        try:
            if not self._given_up:
                await self._waiting("close", self.inner.close)
        finally:
            self.end()

    def end(self) -> None:
        """End the thread after the current call of the thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _called(self, what: str, seconds: float, work: Callable[..., T], *given: Any) -> T:
        async def now() -> T:
            return work(*given)

        # The caller does not use `await`, so this call blocks.
        future = self._submit(now)
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():  # the method itself raised it
                raise
            self._give_up()
            raise Limit(what, "environment", seconds).reason() from None

    async def _waiting(self, method: str, work: Callable[..., Awaitable[T]], *given: Any) -> T:
        future = self._submit(work, *given)
        try:
            return await super()._waiting(method, asyncio.wrap_future, future)
        except (DeadlineExceeded, asyncio.CancelledError):
            if not future.done() or future.cancelled():
                self._give_up()
            raise

    def _submit(self, work: Callable[..., Awaitable[T]], *given: Any) -> Future[T]:
        """Start a call in the thread and return the future of its result."""
        if self._given_up:
            raise DeadlineExceeded("An earlier call exceeded its time limit, and its thread was abandoned.")
        return asyncio.run_coroutine_threadsafe(
            _awaited("`call` of an episode state", work, *given), self._loop
        )

    def _give_up(self) -> None:
        """Abandon the thread. The thread ends if the current call returns."""
        if not self._given_up:
            self._given_up = True
            left_behind.append(self._thread)
            self.end()
