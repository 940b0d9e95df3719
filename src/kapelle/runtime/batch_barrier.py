"""A barrier before each batch: the sampler waits until every episode that may still send a request has sent its request.

The last bits of the results of a sequence depend on the other sequences of its batch. A run is reproducible only if batches always
contain the same sequences, regardless of the speed of environments, tools, graders and endpoints. Everything that can send requests
to the sampler is a `Participant`, such as an episode or a step of its environment. A sampler continues only when every participant in
its event loop is waiting for a result.

A participant is *out* while it is waiting neither for a result of the sampler nor for an inner participant. Participants form a tree:
an episode contains the steps of its environment, and a step may contain a request to a judge.
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Self

SLICES = 10
"""Number of intervals into which the patience is divided. If the machine sleeps, only one of these intervals is used up."""

Order = tuple[int, tuple[int, ...]]
"""Sort key of a participant's requests in a batch, which consists of the number of its last result and its position in the tree."""


class BatchBarrier:
    """The participants of one event loop, for which the sampler waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)
        self.changes = 0
        """Number of events so far. An event occurs when a participant starts, ends, sends a request or receives a result."""
        self.answers = 0
        """Number of completed requests."""
        self.begun = 0
        """Number of outermost participants that have started."""
        self.busy: set[Participant] = set()
        """Participants that are out, for which the sampler waits."""
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
        """Wait until no participant is out.

        If nothing changes for `patience` seconds, print a warning and continue without the remaining participants.
        """
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
    """Return the barrier of the current event loop."""
    loop = asyncio.get_running_loop()
    part = _current.get()
    if part is not None and part.barrier.loop() is loop:
        return part.barrier
    return _barriers.get(loop) or _barriers.setdefault(loop, BatchBarrier(loop))


def current_participant() -> Participant | None:
    """Return the innermost current participant, or None if there is no participant."""
    part = _current.get()
    if part is None or part.barrier.loop() is not asyncio.get_running_loop():
        return None
    return part


def ends_requests() -> None:
    """Declare that the current participant will send no more requests, so that the sampler does not wait for its cleanup."""
    part = current_participant()
    if part is not None and not part.followed:
        part.end()


class Participant:
    """A context manager for code that sends requests to the sampler. A participant may be inside another participant."""

    def __init__(self, place: int | None = None, *, followed: bool = False) -> None:
        """Start a participant at a position among its siblings, by default after all siblings that have already started.

        The argument `followed` states whether another participant starts when this participant ends; if so, the sampler waits until
        this participant has ended.
        """
        self._holder = holder = current_participant()
        self.barrier: BatchBarrier = batch_barrier() if holder is None else holder.barrier
        self.followed = followed
        self.begun = 0
        """Number of inner participants that have started."""
        self.within: set[Participant] = set()
        """Inner participants that have not yet ended."""
        self._requests = 0
        self._late = False
        self._token: Token[Participant | None] | None = None
        self.ended: bool = holder is not None and holder.ended
        """Whether the participant has ended, so that the sampler does not wait for it. Inner participants of an ended participant also
        start in this state."""
        scope: BatchBarrier | Participant = self.barrier if holder is None else holder
        scope.begun += 1
        answered, path = self.barrier.answers, tuple[int, ...]()
        if holder is not None:
            holder.within.add(self)
            holder.note()
            answered, path = holder.order
        self.order: Order = answered, (*path, scope.begun - 1 if place is None else place)
        """Sort key of the participant's requests among the requests of other participants."""
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
        """Record that the participant sent a request."""
        self._requests += 1
        self._late = False
        self.note()

    def ended_request(self) -> None:
        """Record that the participant received a result."""
        self.barrier.answers += 1
        self._requests -= 1
        self.order = (self.barrier.answers, self.order[1])
        self.note()

    def give_up(self) -> None:
        """Let the sampler continue without this participant until the next request of the participant."""
        self._late = True
        self.note()

    def end(self) -> None:
        """End this participant and all inner participants. Further calls have no effect."""
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
        """Report to the barrier whether this participant is out."""
        self.barrier.note(self, not (self.ended or self._late or self._requests or self.within))
