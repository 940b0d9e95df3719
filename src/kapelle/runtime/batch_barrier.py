"""The barrier before a batch: the sampler waits until every episode that may still send a request has sent it.

The last bits of a row's results depend on the other rows of its batch. A run is reproducible only if batches always have the same rows,
however long an environment, a tool, a grader or an endpoint takes. Whatever can send requests to the sampler is a `Participant`: an
episode, or a step of its environment. A sampler continues only when every participant in its event loop waits for an answer.

A participant is *out* while it is busy elsewhere: it waits neither for an answer nor for an inner participant. Participants form a
tree: an episode contains the step of its environment, and a step may contain a request to a judge.
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Self

SLICES = 10
"""The patience is divided into this many slices, because a sleeping machine uses up only one of them."""

Order = tuple[int, tuple[int, ...]]
"""Sort key of a participant's requests in a batch: the number of its last answer, and its place in the tree."""


class BatchBarrier:
    """The participants of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)
        self.changes = 0
        """Number of events so far: a participant begins, ends, sends a request or gets an answer."""
        self.answers = 0
        """Number of answered requests."""
        self.begun = 0
        """Number of outermost participants that have begun."""
        self.busy: set[Participant] = set()
        """Participants that are out."""
        self._waiters: set[asyncio.Future[None]] = set()

    def note(self, part: Participant, out: bool) -> None:
        """Record whether a participant is out."""
        self.changes += 1
        (self.busy.add if out else self.busy.discard)(part)
        if not self.busy and self._waiters:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def all_waiting(self, patience: float) -> None:
        """Wait until no participant is out; after `patience` s without a change, warn and continue without them."""
        idle = 0
        while self.busy and idle < SLICES:
            before = self.changes
            seconds = patience / SLICES
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                async with asyncio.timeout(seconds):
                    await waiter
            except TimeoutError:
                pass
            finally:
                self._waiters.discard(waiter)
            idle = idle + 1 if self.changes == before else 0
        if self.busy:
            warnings.warn(
                f"The sampler continues without {len(self.busy)} of its episodes, whose environments, tools or endpoints have not "
                f"answered for {patience:g} s (`engine.patience`). Another run with the same seed may differ.",
                stacklevel=2,
            )
            for part in list(self.busy):
                part.give_up()


_barriers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, BatchBarrier] = weakref.WeakKeyDictionary()
_current: ContextVar[Participant | None] = ContextVar("part", default=None)


def batch_barrier() -> BatchBarrier:
    """Return the barrier of the running event loop."""
    loop = asyncio.get_running_loop()
    part = _current.get()
    if part is not None and part.barrier.loop() is loop:
        return part.barrier
    return _barriers.get(loop) or _barriers.setdefault(loop, BatchBarrier(loop))


def current_participant() -> Participant | None:
    """Return the innermost current participant, or None."""
    part = _current.get()
    if part is None or part.barrier.loop() is not asyncio.get_running_loop():
        return None
    return part


def ends_requests() -> None:
    """Declare that the current participant sends no more requests, so that the sampler does not wait for its cleanup."""
    part = current_participant()
    if part is not None and not part.followed:
        part.end()


class Participant:
    """A sender of requests, perhaps inside another participant; a context manager."""

    def __init__(self, place: int | None = None, *, followed: bool = False) -> None:
        """Begin at a place among the siblings, by default after those that have already begun.

        `followed`: another participant begins when this one ends, so the sampler waits for its end.
        """
        self._holder = holder = current_participant()
        self.barrier: BatchBarrier = batch_barrier() if holder is None else holder.barrier
        self.followed = followed
        self.begun = 0
        """Number of inner participants that have begun."""
        self.within: set[Participant] = set()
        """Inner participants that have not ended."""
        self._requests = 0
        self._late = False
        self._token: Token[Participant | None] | None = None
        self.ended: bool = holder is not None and holder.ended
        """Whether it has ended, so that the sampler does not wait for it; its inner participants begin as ended."""
        scope: BatchBarrier | Participant = self.barrier if holder is None else holder
        scope.begun += 1
        answered, path = self.barrier.answers, tuple[int, ...]()
        if holder is not None:
            holder.within.add(self)
            holder.note()
            answered, path = holder.order
        self.order: Order = answered, (*path, scope.begun - 1 if place is None else place)
        """Sort key of its requests among those of other participants."""
        self.note()

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        token, self._token = (
            self._token,
            None,
        )  # the token refers to the context, which may refer to this participant
        assert token is not None
        try:  # noqa: SIM105 - three calls fewer than `suppress`, for every episode
            _current.reset(token)
        except ValueError:  # a discarded coroutine is closed in another context
            pass

    def began_request(self) -> None:
        """Note a new request."""
        self._requests += 1
        self._late = False
        self.note()

    def ended_request(self) -> None:
        """Note an answer."""
        self.barrier.answers += 1
        self._requests -= 1
        self.order = (self.barrier.answers, self.order[1])
        self.note()

    def give_up(self) -> None:
        """Let the sampler continue without this participant until its next request."""
        self._late = True
        self.note()

    def end(self) -> None:
        """Send no more requests, and end all inner participants; a second call has no effect."""
        if self.ended:
            return
        self.ended = True
        for inner in list(self.within):
            inner.end()
        if self._holder is not None:
            self._holder.within.discard(self)
            self._holder.note()
        self.note()

    def note(self) -> None:
        """Report to the barrier whether it is out."""
        self.barrier.note(self, not (self.ended or self._late or self._requests or self.within))
