"""The queue of requests to a sampler, and the wait until all of them have arrived.

The last bits of a row's results depend on the other rows of its batch. Engines that sample in this process therefore wait
until no coroutine can continue without a completion, and let requests join in an order that is independent of time. This
makes runs repeatable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kapelle.engines.rollout.protocol import Completion, OnTokens, Request
from kapelle.errors import EngineError
from kapelle.runtime.batch_barrier import BatchBarrier, Participant, current_participant
from kapelle.runtime.deadlines import pause_deadline

QUIET_TICKS = 8
"""Number of turns of the event loop without a new request after which all coroutines are assumed to wait;
nested gathers need up to four to return a result."""

PAUSE = 32
"""Maximum tokens that rows generate before other coroutines run and may submit requests."""

Output = TypeVar("Output")


@dataclass(slots=True, eq=False)
class PendingRequest(Generic[Output]):
    """A request that waits for its completion."""

    request: Request
    future: asyncio.Future[Completion]
    part: Participant | None
    """The part of the rollout that sent the request; None outside a rollout."""
    start_clock: Callable[[], None]
    """Function that is called when its row joins, which starts its deadline."""
    output: Output | None = None
    """The output of its row; None while it waits."""
    notified: bool = False
    on_tokens: OnTokens | None = None
    """Function that is called with the tokens of its row as they are sampled; None without streaming."""

    def order(self) -> tuple[int, tuple[int, ...], str, int]:
        """Sort key among the requests since the last decoding; requests outside rollouts keep their order."""
        if self.part is None:
            return 0, (), "", 0
        return *self.part.order, self.request.agent, self.request.seed

    def notify(self) -> None:
        """Notify the part of the rollout that its request has ended."""
        if self.part is not None and not self.notified:
            self.part.ended_request()
        self.notified = True

    def answer(self, completion: Completion) -> None:
        """Return a completion to the awaiting coroutine, if it is still waiting."""
        self.notify()
        if not self.future.done():
            self.future.set_result(completion)

    def fail(self, error: Exception) -> None:
        """Raise an EngineError in the awaiting coroutine, if it is still waiting."""
        self.notify()
        if not self.future.done():
            failure = error
            if not isinstance(error, EngineError):
                failure = EngineError(f"Decoding failed: {error!r}")
                failure.__cause__ = error
            self.future.set_exception(failure)


@dataclass(slots=True, eq=False, kw_only=True)
class RequestQueue(Generic[Output]):
    """Requests to one base model that have not joined its rows yet."""

    arrived: list[PendingRequest[Output]] = field(default_factory=list)
    """Requests since the last decoding."""
    waiting: list[PendingRequest[Output]] = field(default_factory=list)

    async def answer_to(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """Add a request, as part of the current rollout, and wait for its completion."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        pending = PendingRequest[Output](
            request, future, current_participant(), pause_deadline(), on_tokens=on_tokens
        )
        if pending.part is not None:
            pending.part.began_request()
        self.arrived.append(pending)
        try:
            return await pending.future
        finally:
            pending.notify()

    def enqueue_arrived(self) -> None:
        """Append the arrived requests to the waiting ones, in an order that is independent of time."""
        self.waiting += sorted(self.arrived, key=PendingRequest.order)
        self.arrived = []

    def drop_cancelled(self) -> None:
        """Forget cancelled requests."""
        self.arrived = [pending for pending in self.arrived if not pending.future.done()]
        self.waiting = [pending for pending in self.waiting if not pending.future.done()]


async def wait_for_requests(here: BatchBarrier, arrived: Callable[[], int], patience: float) -> None:
    """Wait until every coroutine and every episode with a busy environment has sent its request or ended.

    `arrived` counts the requests so far; `patience` is the maximum wait in seconds for busy environments while nothing
    happens.
    """
    while True:
        # If no request arrives for some turns of the event loop, all coroutines wait for a completion.
        quiet, before = 0, (-1, -1)
        while quiet < QUIET_TICKS:
            now = (arrived(), here.changes)
            quiet = quiet + 1 if now == before else 0
            before = now
            await asyncio.sleep(0)
        if not (patience and here.busy):
            return
        await here.all_waiting(patience)
