"""Who of several processes is there: each says so every second, and says why when it leaves in error.

They share the store that `torchrun` keeps (without it, rank 0 keeps one). Every rank looks after the one that follows it.
When one is lost, the others end within seconds, with its number, wherever they are: a process that waits for it inside
other people's code is ended. So is one that has lost the store, or gets no answer from it for `family.stalled_after()` seconds.

Where `kapelle train --launch torchrun` has started the ranks, it sees itself which one dies or is stopped, and says so: then they
end without a word.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError

from kapelle.runtime.characters import cleaned
from kapelle.runtime.family import EXIT_ALONE, Signs, here, stalled_after

BEAT = 0.5
"""Seconds between two signs of life."""
ELSEWHERE = 2.0
"""How many times as long as a stopped rank here a silent one on another machine has: nobody can see there whether it computes."""
SOON = 3.0
"""Seconds in which a rank that is alive gives a sign, and one that has failed says why."""
GRACE = 10.0
"""Seconds that this process has, once another is lost, to end by itself."""
EXIT_WRONG = 2


STORE_GONE = "the processes' store is gone, and rank 0, or the launcher, with it"


class Unanswered(RuntimeError):
    """The store has not answered in time."""


class _Line:
    """Questions to a store that may never answer.

    A store that is stopped keeps a call for ever, and after a broken connection torch prints a page about every other one.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._questions: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]]] = queue.SimpleQueue()
        self.broken: str | None = None
        threading.Thread(target=self._answer, daemon=True, name="roll call's store").start()

    def ask(self, question: Callable[[Any], Any]) -> Any:
        """Return the answer; raises Unanswered, and RuntimeError once the connection is broken."""
        answer: Future[Any] = Future()
        self._questions.put((question, answer))
        try:
            return answer.result(SOON)
        except TimeoutError:
            answer.cancel()
            raise Unanswered(f"no answer for {SOON:g} s") from None

    def _answer(self) -> None:
        while True:
            question, answer = self._questions.get()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                if self.broken is not None:
                    raise RuntimeError(self.broken)  # as torch raises it the first time
                answer.set_result(question(self._store))
            except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
                if isinstance(error, DistNetworkError):
                    self.broken = str(error)
                answer.set_exception(error)


class RollCall:
    """Signs of life of all ranks, and the first reason why one failed."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Take a connection to the store that nothing else uses."""
        store.set_timeout(timedelta(seconds=SOON))
        self.rank, self.size = rank, size
        self._line = _Line(store)
        self._ask = self._line.ask
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
            return 0, STORE_GONE
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

    def _beats(self) -> dict[int, int]:
        found = {}
        with suppress(RuntimeError):
            for rank in range(self.size):
                found[rank] = self._ask(partial(_beat, rank=rank))
        return found

    def _watch(self) -> None:
        """Give signs of life; end this process where another is lost and it does not notice."""
        neighbour = (self.rank + 1) % self.size
        limit, looked = stalled_after(), time.monotonic()
        signs: Signs | None = None
        seen, still, unanswered = [-1], 0.0, 0.0
        while not self._over.wait(BEAT):
            # Time in which this process was stopped itself is nobody's silence.
            now = time.monotonic()
            passed, looked = min(now - looked, SOON + 2 * BEAT), now
            try:
                self._ask(lambda store: store.add(f"beat/{self.rank}", 1))
                beat = self._ask(partial(_beat, rank=neighbour))
                failed, unanswered = self.failure(), 0.0
                signs = signs or self._signs(neighbour, lambda: seen[0])
            except RuntimeError:
                unanswered += passed
                failed, beat = None, seen[0]
                if self._line.broken is not None:
                    failed = 0, STORE_GONE
                elif unanswered > limit:
                    failed = (
                        0,
                        f"the processes' store has not answered for {limit:g} s: who keeps it is stopped",
                    )
            still = 0.0 if beat != seen[0] or unanswered else still + passed
            seen[0] = beat
            if failed is None:
                silent = signs.look(passed) if signs is not None and not unanswered else None
                if silent is None and signs is None and still > ELSEWHERE * limit:
                    silent = f"it has given no sign of life for {ELSEWHERE * limit:g} s"
                if silent is not None:
                    self.fail_for(neighbour, silent)
                    failed = neighbour, silent
            if failed is not None and not self._over.wait(GRACE):
                self._end(*failed)

    def _signs(self, rank: int, beats: Callable[[], int]) -> Signs | None:
        """Return the signs of life of a rank on this machine; None for one elsewhere."""
        said = json.loads(self._ask(lambda store: store.get(f"here/{rank}")))
        same = said["space"] and {**said, "process": 0} == {**whereabouts(), "process": 0}
        return Signs(said["process"], beats) if same else None

    def fail_for(self, rank: int, reason: str) -> None:
        """Say for another rank, which cannot, that it has failed."""
        with suppress(RuntimeError):
            self._ask(
                lambda store: store.compare_set("failed", "", json.dumps({"rank": rank, "reason": reason}))
            )

    def _end(self, rank: int, reason: str) -> None:
        if here.told_of:
            os._exit(EXIT_ALONE)
        self.say_once(
            lambda: print(cleaned(f"kapelle: Rank {rank} has failed: {reason}"), file=sys.stderr, flush=True),  # noqa: T201
            after_others=True,
        )
        os._exit(EXIT_WRONG)


def whereabouts() -> dict[str, Any]:
    """Return where this process can be looked at: its machine and namespace, and its number there."""
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        space = ""
    return {"host": socket.gethostname(), "space": space, "process": os.getpid()}


def _beat(store: Any, rank: int) -> int:
    return int(store.add(f"beat/{rank}", 0))
