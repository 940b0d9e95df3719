"""The barrier before a batch: the sampler waits until every episode that may still send a request has sent it.

The result of a row depends, in its last bits, on the other rows in its batch. So a run repeats only if batches are made of the
same rows every time, however long a world, a tool, a grader or an endpoint takes. Whatever can send requests to the sampler
is a `Participant`: an episode, or a step of its world. A sampler continues only when every participant in its event loop waits
for an answer.

A participant is *out* while it is busy elsewhere: it waits neither for an answer nor for a participant within it. They form a
tree: an episode holds the step that its world takes, and a step may hold the question that it asks a judge.
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from contextlib import suppress
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Self

SLICES = 10
"""The patience is waited in so many slices: a machine that was asleep uses up only one of them."""

Order = tuple[int, tuple[int, ...]]
"""Order of a participant's requests among those that join a batch together: when it was last answered, and its place."""


class BatchBarrier:
    """The participants of one event loop."""

    def __init__(self) -> None:
        self.changes = 0
        """How often a participant began, ended, asked or was answered."""
        self.answers = 0
        """Requests that were answered."""
        self._out: set[Participant] = set()
        self._begun = 0
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def busy(self) -> int:
        """Number of participants that are busy elsewhere and waited for."""
        return len(self._out)

    def admit(self, part: Participant, place: int | None) -> Order:
        """Let an outermost participant begin and return the order of its requests, by default after all others."""
        self._begun += 1
        return self.answers, (self._begun - 1 if place is None else place,)

    def release(self, part: Participant) -> None:
        """Let an outermost participant end."""

    def note(self, part: Participant, out: bool) -> None:
        """Record whether a participant is out."""
        self.changes += 1
        (self._out.add if out else self._out.discard)(part)
        if not self._out:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def all_waiting(self, patience: float) -> None:
        """Wait until no participant is out; after `patience` s without any change, go on without those that are, with a warning."""
        idle = 0
        while self._out and idle < SLICES:
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
        if self._out:
            warnings.warn(
                f"The sampler goes on without {len(self._out)} of its episodes, whose worlds, tools or endpoints have not "
                f"answered for {patience:g} s (`engine.patience`): from here on this run need not repeat to the bit.",
                stacklevel=2,
            )
            for part in list(self._out):
                part.give_up()


_barriers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, BatchBarrier] = weakref.WeakKeyDictionary()
_current: ContextVar[Participant | None] = ContextVar("part", default=None)


def batch_barrier() -> BatchBarrier:
    """Return the barrier of the running event loop."""
    return _barriers.setdefault(asyncio.get_running_loop(), BatchBarrier())


def current_participant() -> Participant | None:
    """Return the innermost participant that this code belongs to; None outside every one."""
    part = _current.get()
    return part if part is not None and part.barrier is batch_barrier() else None


def ends_requests() -> None:
    """Declare that the current participant sends no more requests, so that the sampler does not wait while it cleans up."""
    part = current_participant()
    if part is not None and not part.followed:
        part.end()


class Participant:
    """Something that may send requests, within another participant or by itself; as a context manager it begins and ends."""

    def __init__(self, place: int | None = None, *, followed: bool = False) -> None:
        """Begin at a place among the participants next to it, by default after those that began before.

        `followed`: another participant begins once this one has ended, so that its end is waited for.
        """
        self.barrier = batch_barrier()
        self.followed = followed
        self._holder: Participant | BatchBarrier = current_participant() or self.barrier
        self._begun = 0
        self._asking = 0
        self._within: set[Participant] = set()
        self._late = False
        # What begins within a participant that has ended is not waited for either.
        self._over: bool = isinstance(self._holder, Participant) and self._holder.ended
        self._token: Token[Participant | None] | None = None
        self.order = self._holder.admit(self, place)
        self._note()

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        token, self._token = self._token, None  # it holds the context, which may hold this participant
        assert token is not None
        with suppress(ValueError):  # a discarded coroutine is closed in another context than it ran in
            _current.reset(token)

    @property
    def ended(self) -> bool:
        """Whether it has ended, so that the sampler does not wait for it."""
        return self._over

    def began_request(self) -> None:
        """Note that one more request waits for its answer."""
        self._asking += 1
        self._late = False
        self._note()

    def ended_request(self) -> None:
        """Note that a request was answered."""
        self.barrier.answers += 1
        self._asking -= 1
        self.order = (self.barrier.answers, self.order[1])
        self._note()

    def give_up(self) -> None:
        """Let the sampler go on without this participant, until it asks again."""
        self._late = True
        self._note()

    def end(self) -> None:
        """Send no more requests, and end all participants within; a second call does nothing."""
        if self._over:
            return
        self._over = True
        for inner in list(self._within):
            inner.end()
        self._holder.release(self)
        self._note()

    def admit(self, part: Participant, place: int | None) -> Order:
        """Let a participant begin within this one and return the order of its requests."""
        self._begun += 1
        self._within.add(part)
        self._note()
        answered, path = self.order
        return answered, (*path, self._begun - 1 if place is None else place)

    def release(self, part: Participant) -> None:
        """Let a participant within this one end."""
        self._within.discard(part)
        self._note()

    def _note(self) -> None:
        self.barrier.note(self, not (self._over or self._late or self._asking or self._within))
