"""A checkpoint that is written while training goes on: at most one, whose end all ranks learn of together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from kapelle.runtime.interrupts import unbroken
from kapelle.runtime.loose_threads import LooseThreads
from kapelle.runtime.ranks import Meeting, Ranks


class Saving:
    """The save that is under way, if any."""

    def __init__(self, ranks: Ranks) -> None:
        """Save with these ranks."""
        self._ranks = ranks
        self._threads = LooseThreads(1)
        self._under_way: tuple[int, Future[Path]] | None = None

    def begin(self, step: int, save: Callable[[Meeting], Path]) -> None:
        """Begin to save `step` in a thread; none is under way."""
        assert self._under_way is None, "one checkpoint is written at a time"
        self._under_way = step, self._threads.submit(save, self._ranks.aside())

    def settled(self, *, wait: bool) -> int | None:
        """Return the step of a save that has ended since the last call, in all ranks; None if there is none.

        `wait` waits for one that is under way. Raises in every rank what has prevented it in one.
        """
        if self._under_way is None:
            return None
        step, future = self._under_way

        def look() -> bytes:
            if wait:
                _wait(future)
            if future.done():
                future.result()
            return b"ended" if future.done() else b""

        try:
            ended = all(self._ranks.together("save", look))
        except BaseException:
            self._under_way = None
            raise
        if not ended:
            return None
        self._under_way = None
        return step

    def end(self, *, drop: bool = False) -> None:
        """Wait for a save that is under way and raise what has prevented it; or `drop` it, half written and not to be seen."""
        (_, future), self._under_way = self._under_way or (0, None), None
        self._threads.shutdown(wait=False)
        if future is not None and not drop:
            _wait(future)
            future.result()


def _wait(future: Future[Path]) -> None:
    with unbroken():
        future.exception()
