"""Share the first turns of episodes among the episodes of a group.

With the widths w₁, w₂, …, the first moment of a group is sampled w₁ times. After each of these samples, the second moment is sampled
w₂ times, and so on. The w₁·w₂·… episodes of the group therefore share w₁ first moments. Every turn is sampled only once. Only moments
with a turn of a trained agent are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import NamedTuple

from kapelle.engines.rollout.protocol import Completion
from kapelle.runtime.batch_barrier import current_participant


class SharedAnswers:
    """Completions that the episodes of one group share."""

    def __init__(self, widths: Sequence[int]) -> None:
        """Create `widths[k]` branches at moment k. The product of the widths is the number of episodes."""
        self.widths = tuple(widths)
        self._answers: dict[Hashable, asyncio.Future[Completion | None]] = {}

    def branch(self, sample: int) -> Branch:
        """Return the branch of the episode with this index."""
        ways: list[int] = []
        for width in reversed(self.widths):
            sample, way = divmod(sample, width)
            ways.append(way)
        return Branch(self, tuple(reversed(ways)))

    async def once(self, key: Hashable, ask: Callable[[], Awaitable[Completion]]) -> Completion:
        """Return the result of the first call with this key.

        Other calls wait for this result. If the first call fails, they call `ask`.
        """
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
            if part is not None:  # the sampler waits for the completion, not for this episode
                part.began_request()
            try:
                found = await asyncio.shield(future)
            finally:
                if part is not None:
                    part.ended_request()
            if found is not None:
                return found


class Branch(NamedTuple):
    """The branches of one of the episodes that share first turns."""

    answers: SharedAnswers
    ways: tuple[int, ...]
    """Index of the episode's branch at each moment. A shared turn belongs to the episode whose later indices are all 0."""
