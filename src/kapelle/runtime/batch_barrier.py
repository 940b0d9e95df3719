"""Which episodes may still send requests to the sampler but are busy elsewhere: a world, a tool, a grader, an endpoint.

The result of a row depends, in its last bits, on the rows in the same batch. So a run repeats only if the same rows
meet every time, however long a world took. Whatever can send requests is a `Participant`: an episode or a step of its world.
A sampler continues only when every part of its event loop waits for an answer.

A part is *out* when it neither waits for an answer nor for a part within it. That is a tree: an episode holds the step
that its world takes, a step may hold the question that it asks a judge.
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
"""Number of slices of the patience: a machine that was asleep loses only one of them."""

Order = tuple[int, tuple[int, ...]]
"""Order of a part's requests among those that join at the same time: when it was last answered, and its place."""


class BatchBarrier:
    """The parts of one event loop."""

    def __init__(self) -> None:
        self.changes = 0
        """Times that a part began, ended, asked or was answered."""
        self.answers = 0
        """Requests that were answered."""
        self._out: set[Participant] = set()
        self._begun = 0
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def busy(self) -> int:
        """Number of parts that are busy elsewhere and waited for."""
        return len(self._out)

    def admit(self, part: Participant, place: int | None) -> Order:
        """Let an outermost part begin and return the order of its requests, by default after all others."""
        self._begun += 1
        return self.answers, (self._begun - 1 if place is None else place,)

    def release(self, part: Participant) -> None:
        """Let an outermost part end."""

    def note(self, part: Participant, out: bool) -> None:
        """Record whether a part is out."""
        self.changes += 1
        (self._out.add if out else self._out.discard)(part)
        if not self._out:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def all_waiting(self, patience: float) -> None:
        """Wait until no part is out; when nothing has happened for `patience` s, give up those that are, with a warning."""
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


_rooms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, BatchBarrier] = weakref.WeakKeyDictionary()
_current: ContextVar[Participant | None] = ContextVar("part", default=None)


def batch_barrier() -> BatchBarrier:
    """Return the room of the running event loop."""
    return _rooms.setdefault(asyncio.get_running_loop(), BatchBarrier())


def current_participant() -> Participant | None:
    """Return the innermost part that this code belongs to; None outside every one."""
    part = _current.get()
    return part if part is not None and part.room is batch_barrier() else None


def ends_requests() -> None:
    """Declare that the current part sends no more requests, so that nothing waits while it cleans up."""
    part = current_participant()
    if part is not None and not part.followed:
        part.end()


class Participant:
    """Something that may send requests, within another part or by itself; a context manager begins and ends it."""

    def __init__(self, place: int | None = None, *, followed: bool = False) -> None:
        """Begin at a place among the parts next to it, by default after those that began before.

        `followed`: another part begins once this one has ended, so that its end is waited for.
        """
        self.room = batch_barrier()
        self.followed = followed
        self._holder: Participant | BatchBarrier = current_participant() or self.room
        self._begun = 0
        self._asking = 0
        self._within: set[Participant] = set()
        self._late = False
        # What begins within a part that has ended is not waited for either.
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
        token, self._token = self._token, None  # it holds the context, which may hold what holds this part
        assert token is not None
        with suppress(ValueError):  # a coroutine that was thrown away is closed elsewhere than where it ran
            _current.reset(token)

    @property
    def ended(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._over

    def began_request(self) -> None:
        """Wait for one more answer."""
        self._asking += 1
        self._late = False
        self._note()

    def ended_request(self) -> None:
        """Wait for one answer fewer."""
        self.room.answers += 1
        self._asking -= 1
        self.order = (self.room.answers, self.order[1])
        self._note()

    def give_up(self) -> None:
        """Wait for this part no longer, until it asks again."""
        self._late = True
        self._note()

    def end(self) -> None:
        """Send no more requests, and end all parts within; a second call does nothing."""
        if self._over:
            return
        self._over = True
        for inner in list(self._within):
            inner.end()
        self._holder.release(self)
        self._note()

    def admit(self, part: Participant, place: int | None) -> Order:
        """Let a part begin within this one and return the order of its requests."""
        self._begun += 1
        self._within.add(part)
        self._note()
        answered, path = self.order
        return answered, (*path, self._begun - 1 if place is None else place)

    def release(self, part: Participant) -> None:
        """Let a part within this one end."""
        self._within.discard(part)
        self._note()

    def _note(self) -> None:
        self.room.note(self, not (self._over or self._late or self._asking or self._within))
