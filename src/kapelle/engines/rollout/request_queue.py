"""The queue of sampling requests, and the function that waits until all requests have arrived.

The last bits of a row's results depend on the other rows of its batch. Engines that sample in this process therefore
wait until no coroutine can continue without a completion, and add requests to the batch in an order that is independent
of time. As a result, runs are repeatable.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kapelle.engines.rollout.protocol import (
    Completion,
    HeldRequest,
    Interruptible,
    OnTokens,
    Request,
    joined_runs,
)
from kapelle.errors import EngineError
from kapelle.runtime.batch_barrier import BatchBarrier, Participant, batch_barrier, current_participant
from kapelle.runtime.deadlines import pause_deadline
from kapelle.types import FinishReason, Routing

QUIET_TICKS = 8
"""The number of iterations of the event loop without a new request after which all coroutines are assumed to be
waiting. Nested calls of `asyncio.gather` need up to four iterations to return a result."""

PAUSE = 32
"""The maximum number of tokens that rows generate before other coroutines get a chance to run and submit requests."""

Output = TypeVar("Output")


@dataclass(slots=True, eq=False)
class PendingRequest(Generic[Output]):
    """A request that is waiting for its completion."""

    request: Request
    future: asyncio.Future[Completion]
    part: Participant | None
    """The participant in the rollout that sent the request, or None outside a rollout."""
    start_clock: Callable[[], None]
    """A function that is called when the request joins the batch and that starts the request's deadline."""
    output: Output | None = None
    """The output of the request's row in the batch, or None while the request is waiting in the queue."""
    notified: bool = False
    on_tokens: OnTokens | None = None
    """A callback that receives the tokens of the request as they are sampled, or None if the request does not stream."""
    ids: tuple[int, ...] = ()
    """The tokens that were sampled before the request was put on hold (see `Interruptible`)."""
    logprobs: tuple[float, ...] = ()
    runs: tuple[tuple[int, int], ...] = ()
    """The versions of the weights that sampled `ids`, each with its number of tokens."""
    weights_hash: str = ""
    """The hash of the last of these weights."""

    @property
    def text_ids(self) -> tuple[int, ...]:
        """The prompt and all tokens that were sampled before the request was last put on hold."""
        return self.request.prompt_ids + self.request.begun + self.ids

    def sampled(self, ids: Sequence[int], logprobs: Sequence[float], version: int, weights_hash: str) -> None:
        """Add tokens that the weights `version` sampled."""
        if not ids:
            return
        self.ids, self.logprobs = (*self.ids, *ids), (*self.logprobs, *logprobs)
        self.runs = joined_runs(self.runs, ((version, len(ids)),))
        self.weights_hash = weights_hash

    def completion(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: FinishReason,
        text: str,
        version: int,
        weights_hash: str,
        routing: Routing | None = None,
    ) -> Completion:
        """Return the completion, of which the weights `version` sampled the last tokens."""
        self.sampled(ids, logprobs, version, weights_hash)
        return Completion(
            self.ids,
            self.logprobs,
            finish_reason,
            text,
            self.runs[-1][0] if self.runs else version,
            self.weights_hash or weights_hash,
            routing,
            constraint=self.request.sampling.constraint,
            runs=self.runs if len(self.runs) > 1 else (),
        )

    def held(self) -> HeldRequest:
        """Return the request with the tokens sampled so far."""
        return HeldRequest(self.request, self.ids, self.logprobs, self.runs, self.weights_hash)

    def order(self) -> tuple[int, tuple[int, ...], str, int]:
        """Return the key by which requests that arrived since the last decoding are sorted; requests outside rollouts keep their order."""
        if self.part is None:
            return 0, (), "", 0
        return *self.part.order, self.request.agent, self.request.seed

    def notify(self) -> None:
        """Notify the sending participant of the rollout that its request has ended."""
        if self.part is not None and not self.notified:
            self.part.ended_request()
        self.notified = True

    def answer(self, completion: Completion) -> None:
        """Return a completion to the coroutine that awaits the request, if the coroutine is still waiting."""
        self.notify()
        if not self.future.done():
            self.future.set_result(completion)

    def fail(self, error: Exception) -> None:
        """Raise an EngineError in the coroutine that awaits the request, if the coroutine is still waiting."""
        self.notify()
        if not self.future.done():
            failure = error
            if not isinstance(error, EngineError):
                failure = EngineError(f"Decoding failed: {error!r}")
                failure.__cause__ = error
            self.future.set_exception(failure)


@dataclass(slots=True, eq=False, kw_only=True)
class RequestQueue(Generic[Output]):
    """The requests to one base model."""

    arrived: list[PendingRequest[Output]] = field(default_factory=list)
    """The requests that arrived since the last decoding."""
    waiting: list[PendingRequest[Output]] = field(default_factory=list)
    in_flight: Sized = ()
    """The requests in the current batch."""

    async def answer_to(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """Submit a request on behalf of the current rollout participant and wait for the completion."""
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
        """Move the newly arrived requests to the end of the waiting list, in an order that is independent of time."""
        self.waiting += sorted(self.arrived, key=PendingRequest.order)
        self.arrived = []

    def drop_cancelled(self) -> None:
        """Remove cancelled requests from the queue."""
        self.arrived = [pending for pending in self.arrived if not pending.future.done()]
        self.waiting = [pending for pending in self.waiting if not pending.future.done()]


Queue = TypeVar("Queue", bound=RequestQueue[Any])


class BatchingEngine(Interruptible, Generic[Queue]):
    """An engine that samples in batches: a task adds waiting requests to the batches while there are any, or puts them on hold."""

    def __init__(self, patience: float) -> None:
        """Create an engine without requests. The argument `patience` is the maximum time in seconds to wait for busy episodes."""
        self._patience = patience
        self._pump: asyncio.Task[None] | None = None
        self._holding: asyncio.Future[list[HeldRequest]] | None = None
        """The future that receives the requests on hold, or None if no request is on hold."""
        self._resumed = asyncio.Event()

    @abstractmethod
    def _all_queues(self) -> Sequence[Queue]:
        """Return the queues of all base models."""

    @abstractmethod
    def _advance(self, queue: Queue) -> None:
        """Add waiting requests to the batch, sample a few tokens for each row, and return finished completions."""

    @abstractmethod
    def _hold(self, queue: Queue) -> None:
        """Remove all rows from the batch, and return their requests with their tokens to the waiting list."""

    @abstractmethod
    def _fail(self, queue: Queue, error: Exception, *, waiting: bool) -> None:
        """Fail the requests of the batch with an error, and also all that are `waiting`."""

    @abstractmethod
    def _forget_interrupted(self) -> None:
        """Drop the requests of a cancelled run, because no coroutine is waiting for their completions."""

    @property
    def _runs(self) -> bool:
        """Whether the task that processes requests is running."""
        return self._pump is not None and not self._pump.done()

    def _start_pump(self) -> None:
        """Start the task that processes requests, if it is not running."""
        if not self._runs:
            self._forget_interrupted()
            self._pump = asyncio.get_running_loop().create_task(self._drain(batch_barrier()))

    async def hold(self) -> Sequence[HeldRequest]:
        """Put all unfinished requests on hold, and return them (see `Interruptible.hold`)."""
        self._resumed = asyncio.Event()
        self._holding = asyncio.get_running_loop().create_future()
        holding = self._holding
        self._start_pump()
        return await holding

    def resume(self) -> None:
        """Continue the requests on hold with the current weights (see `Interruptible.resume`)."""
        self._resumed.set()

    async def _drain(self, here: BatchBarrier) -> None:
        """Process requests until none is left: wait for all requests that can arrive, then sample from each base model in turn."""
        queues = self._all_queues()
        while self._holding is not None or any(
            queue.arrived or queue.waiting or queue.in_flight for queue in queues
        ):
            failure: Exception | None = None
            try:
                await wait_for_requests(
                    here, lambda: sum(len(queue.arrived) for queue in queues), self._patience
                )
            except Exception as error:  # noqa: BLE001 - passed on to the requests that wait
                failure = error
            for queue in queues:
                queue.enqueue_arrived()
                if failure is not None:
                    self._fail(queue, failure, waiting=True)
            if self._holding is not None:
                holding, self._holding = self._holding, None
                try:
                    for queue in queues:
                        queue.drop_cancelled()
                        self._hold(queue)
                    holding.set_result([pending.held() for queue in queues for pending in queue.waiting])
                except Exception as error:  # noqa: BLE001 - passed on to the requests and to the caller
                    for queue in queues:
                        self._fail(queue, error, waiting=True)
                    holding.set_exception(error)
                    continue
                await self._resumed.wait()
                continue
            for queue in queues:
                try:
                    queue.drop_cancelled()
                    self._advance(queue)
                except Exception as error:  # noqa: BLE001 - passed on likewise
                    self._fail(queue, error, waiting=False)


async def wait_for_requests(here: BatchBarrier, arrived: Callable[[], int], patience: float) -> None:
    """Wait until every coroutine, and every episode whose environment is busy, has sent its request or ended.

    The function `arrived` returns the number of requests so far. The argument `patience` is the maximum time in seconds
    to wait for busy environments while nothing changes.
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
