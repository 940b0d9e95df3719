"""Shared beginnings: how the episodes of a group branch.

With widths w₁, w₂, … the episodes of a group share turns: each first moment is sampled w₁ times, each second
moment after it w₂ times, so that w₁·w₂·… episodes have w₁ first moments. Every turn is sampled once. A moment counts if a trained agent
speaks in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import NamedTuple

from kapelle.engines.rollout.protocol import Completion
from kapelle.runtime.batch_barrier import current_participant


class SharedAnswers:
    """What the episodes of one group have sampled for all of them."""

    def __init__(self, widths: Sequence[int]) -> None:
        """Branch so many times at each moment; the product of `widths` is the number of episodes."""
        self.widths = tuple(widths)
        self._answers: dict[Hashable, asyncio.Future[Completion | None]] = {}

    def branch(self, sample: int) -> Branch:
        """Return how the episode of this number branches."""
        ways: list[int] = []
        for width in reversed(self.widths):
            sample, way = divmod(sample, width)
            ways.append(way)
        return Branch(self, tuple(reversed(ways)))

    async def once(self, key: Hashable, ask: Callable[[], Awaitable[Completion]]) -> Completion:
        """Return what the first call with this key gets; the others wait for it, and ask themselves where it fails."""
        while True:
            future = self._answers.get(key)
            if future is None:
                future = self._answers[key] = asyncio.get_running_loop().create_future()
                try:
                    answer = await ask()
                except BaseException:
                    del self._answers[key]
                    future.set_result(None)
                    raise
                future.set_result(answer)
                return answer
            part = current_participant()
            if part is not None:  # the sampler waits for the answer, and not for this episode
                part.began_request()
            try:
                found = await asyncio.shield(future)
            finally:
                if part is not None:
                    part.ended_request()
            if found is not None:
                return found


class Branch(NamedTuple):
    """One of the episodes that share their beginnings."""

    answers: SharedAnswers
    ways: tuple[int, ...]
    """Which way it takes at each moment that branches. What is sampled before the last one is counted in the episode whose later
    ways are all 0."""
