"""How many answers are under way at once, and for how long each may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import TypeVar

from kapelle.services.http.refusals import Refusal, busy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a policy server takes on."""

    calls: int = 1024
    """Answers under way at once, each of `n` choices counted; further calls are told to come again (429)."""
    seconds: float = 600.0
    """For which one call may take, its time in the queue included."""
    idle: float = 3600.0
    """Seconds after its last call in which a recorded session keeps its place, where others ask for one."""


class Admission:
    """Counts answers under way; used by one thread."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.under_way = 0

    def admit(self, answers: int) -> Ticket:
        """Return a ticket for so many answers; Refusal (429) where there is no room for them."""
        if self.under_way + answers > self.limits.calls:
            raise busy(
                f"{self.under_way} answers are under way, of {self.limits.calls} at most. Try again later."
            )
        self.under_way += answers
        return Ticket(self, answers)


class Ticket:
    """Room for the answers of one call, until it is given back; a second time does nothing."""

    def __init__(self, admission: Admission, answers: int) -> None:
        self._admission, self._answers = admission, answers
        self._then: list[Callable[[], None]] = []
        seconds = admission.limits.seconds
        self.until = asyncio.get_running_loop().time() + seconds
        self.late = Refusal(504, f"No answer within {seconds:g} s.", None, "timeout")

    def then(self, work: Callable[[], None]) -> None:
        """Do this too when the room is given back."""
        self._then.append(work)

    def release(self) -> None:
        """Give the room back."""
        self._admission.under_way -= self._answers
        self._answers = 0
        while self._then:
            self._then.pop()()

    async def bounded(self, pieces: AsyncIterator[T]) -> AsyncIterator[T]:
        """Yield pieces within the call's time, then give the room back; Refusal (504) when it takes longer."""
        async with AsyncExitStack() as closing:
            closing.callback(self.release)
            await closing.enter_async_context(aclosing(pieces))  # type: ignore[type-var]
            while True:
                try:
                    async with asyncio.timeout_at(self.until):
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise self.late from None
                yield piece
