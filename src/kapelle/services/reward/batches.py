"""Answers of all callers, scored in batches by one thread.

Nobody waits for a batch to fill: while one is scored others arrive, and whoever waits by then is the next batch.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from kapelle.services.log import log_failure
from kapelle.services.reward.scores import Answered, Score, ungraded

FAILED = "The model failed on this answer; the service's log says why."


class Full(Exception):
    """There is no room for more answers now."""


@dataclass(eq=False, slots=True)
class _Call:
    answers: Sequence[Answered]
    future: Future[list[Score]] = field(default_factory=Future)
    begun: int = 0
    """How many of its answers are in a batch already, or behind one."""
    scores: list[Score] = field(default_factory=list)


class Batches:
    """Scores what callers hand in; a context manager."""

    def __init__(self, score: Callable[[Sequence[Answered]], Sequence[Score]], most: int, room: int) -> None:
        """Score `most` answers together at most, and hold `room` of them, waiting and under way."""
        self._score, self._most, self.room = score, most, room
        self._waiting: deque[_Call] = deque()
        self._held = 0
        self._over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="kapelle-reward", daemon=True)

    @property
    def held(self) -> int:
        """Answers that wait or are being scored."""
        return self._held

    def submit(self, answers: Sequence[Answered]) -> Future[list[Score]]:
        """Return what will hold a score for each answer; raises Full when there is no room.

        Cancelled, its answers leave the queue and their room is free.
        """
        call = _Call(answers)
        with self._changed:
            if self._held + len(answers) > self.room:
                raise Full(f"{self._held} answers are waiting, of {self.room} at most. Try again later.")
            self._held += len(answers)
            self._waiting.append(call)
            self._changed.notify()
        call.future.add_done_callback(lambda _: self._forget(call))
        return call.future

    async def scored(self, answers: Sequence[Answered], seconds: float) -> list[Score]:
        """Return a score for each answer; raises Full, or TimeoutError after `seconds`. Cancelled, it makes room."""
        scores = self.submit(answers)
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(scores)

    def _forget(self, call: _Call) -> None:
        """Give back the room of answers that nobody waits for any more."""
        with self._changed:
            if call in self._waiting:
                self._waiting.remove(call)
                self._held -= len(call.answers) - call.begun

    def _work(self) -> None:
        while batch := self._next():
            scores = self._scored([call.answers[k] for call, k in batch])
            with self._changed:
                self._held -= len(batch)
            for (call, _), score in zip(batch, scores, strict=True):
                call.scores.append(score)
                if len(call.scores) == len(call.answers):
                    with suppress(InvalidStateError):  # cancelled meanwhile
                        call.future.set_result(call.scores)

    def _next(self) -> list[tuple[_Call, int]]:
        """Return the answers of the next batch, by call and place; none when it is over."""
        batch: list[tuple[_Call, int]] = []
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._over)
            while self._waiting and len(batch) < self._most and not self._over:
                call = self._waiting[0]
                until = min(len(call.answers), call.begun + self._most - len(batch))
                batch.extend((call, k) for k in range(call.begun, until))
                call.begun = until
                if until == len(call.answers):
                    self._waiting.popleft()
        return batch

    def _scored(self, answers: Sequence[Answered]) -> Sequence[Score]:
        """Return a score for each; where a batch fails each is tried alone, so that it spoils no other."""
        try:
            return self._score(answers)
        except Exception as error:
            log_failure(f"A batch of {len(answers)} answers could not be scored.", error)
        if len(answers) == 1:
            return [ungraded(FAILED)]
        return [score for answer in answers for score in self._scored([answer])]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            left = list(self._waiting)
            self._changed.notify()
        for call in left:
            call.future.cancel()
        self._thread.join(5.0)
