"""Who of several processes is there: each says so every second, and says why when it leaves in error.

They share the store that `torchrun` keeps (without it, rank 0 keeps one). Every rank looks after the one that follows it.
When one is lost, the others end within seconds, with its number, wherever they are: a process that waits for it inside
other people's code is ended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from kapelle.runtime.characters import cleaned

BEAT = 0.5
"""Seconds between two signs of life."""
SILENCE = 30.0
"""Seconds without a sign after which a rank is lost."""
SOON = 3.0
"""Seconds in which a rank that is alive gives a sign, and one that has failed says why."""
GRACE = 10.0
"""Seconds that this process has, once another is lost, to end by itself."""
EXIT_WRONG = 2


class RollCall:
    """Signs of life of all ranks, and the first reason why one failed."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Take a connection to the store that nothing else uses."""
        self._store, self.rank, self.size = store, rank, size
        self._store.set_timeout(timedelta(seconds=SOON))
        self._guard = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="roll call")

    def begin(self) -> None:
        """Give signs of life from now on, and look after the next rank."""
        self._thread.start()

    def end(self) -> None:
        """Leave without error."""
        self._over.set()

    def fail(self, reason: str) -> None:
        """Tell the others why this rank leaves; the first reason of all stays."""
        self._over.set()
        with suppress(RuntimeError):
            self._ask(
                lambda store: store.compare_set(
                    "failed", "", json.dumps({"rank": self.rank, "reason": reason})
                )
            )

    def failure(self) -> tuple[int, str] | None:
        """Return which rank failed first, and why; None if none said so."""
        with suppress(RuntimeError):
            if self._ask(lambda store: store.check(["failed"])):
                said = json.loads(self._ask(lambda store: store.get("failed")))
                return int(said["rank"]), str(said["reason"])
        return None

    def why_lost(self) -> tuple[int | None, str]:
        """Return which rank is gone, and why: it said so within seconds, or gives no sign of life any more."""
        until = time.monotonic() + SOON
        before = self._beats()
        while time.monotonic() < until:
            said = self.failure()
            if said is not None:
                return said
            time.sleep(BEAT / 5)
        now = self._beats()
        silent = [
            rank for rank in range(self.size) if before.get(rank) == now.get(rank) and rank != self.rank
        ]
        if not now:
            return 0, "the processes' store is gone, and rank 0, or the launcher, with it"
        if silent:
            return silent[0], "it died without a word: it was killed, or its machine is gone"
        return None, "a connection between two ranks broke"

    def say_once(self, say: Callable[[], None], *, after_others: bool = False) -> None:
        """Say something unless another rank has said why all of them end; wait until it has been said."""
        try:
            if after_others and self._becomes("saying"):
                self._becomes("said")
                return
            if self._ask(lambda store: store.add("saying", 1)) == 1:
                say()
                self._ask(lambda store: store.add("said", 1))
            else:
                self._becomes("said")
        except RuntimeError:  # no store any more: better twice than never
            say()

    def _becomes(self, name: str) -> bool:
        until = time.monotonic() + SOON
        while time.monotonic() < until:
            if self._ask(lambda store: store.check([name])):
                return True
            time.sleep(BEAT / 10)
        return False

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        with self._guard:
            return question(self._store)

    def _beats(self) -> dict[int, int]:
        found = {}
        with suppress(RuntimeError):
            for rank in range(self.size):
                found[rank] = self._ask(partial(_beat, rank=rank))
        return found

    def _watch(self) -> None:
        """Give signs of life; end this process where another is lost and it does not notice."""
        neighbour = (self.rank + 1) % self.size
        seen, still, looked = -1, 0.0, time.monotonic()
        while not self._over.wait(BEAT):
            now = time.monotonic()
            paused, looked = now - looked > SILENCE / 2, now
            try:
                self._ask(lambda store: store.add(f"beat/{self.rank}", 1))
                beat = self._ask(partial(_beat, rank=neighbour))
                failed = self.failure()
            except RuntimeError:
                failed, beat = None, seen
            # Time in which this process was stopped itself is nobody's silence.
            still = 0.0 if beat != seen or paused else still + BEAT
            seen = beat
            if failed is None and still > SILENCE:
                self.fail_for(neighbour, f"it has given no sign of life for {SILENCE:g} s")
                failed = self.failure()
            if failed is not None and not self._over.wait(GRACE):
                self._end(*failed)

    def fail_for(self, rank: int, reason: str) -> None:
        """Say for another rank, which cannot, that it has failed."""
        with suppress(RuntimeError):
            self._ask(
                lambda store: store.compare_set("failed", "", json.dumps({"rank": rank, "reason": reason}))
            )

    def _end(self, rank: int, reason: str) -> None:
        self.say_once(
            lambda: print(cleaned(f"kapelle: Rank {rank} has failed: {reason}"), file=sys.stderr, flush=True),  # noqa: T201
            after_others=True,
        )
        os._exit(EXIT_WRONG)


def _beat(store: Any, rank: int) -> int:
    return int(store.add(f"beat/{rank}", 0))
