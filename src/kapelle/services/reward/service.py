"""The routes of the reward server, and the thread that scores all callers' answers in batches."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from pydantic import Field, model_validator

from kapelle.services.http.application import Answer, Call, Route
from kapelle.services.http.refusals import Body, Refusal, busy, read_body, wrong
from kapelle.services.log import log_failure
from kapelle.services.reward.scores import MOST_ITEMS, Answered, Role, Score, ungraded
from kapelle.types import Json, Message

# -------- Answers of all callers, scored in batches by one thread
#
# Nobody waits for a batch to fill: while one is scored others arrive, and whoever waits by then is the next batch.

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


class SaidBefore(Body):
    """A message of the conversation that is answered."""

    role: Role
    content: str


class Item(Body):
    """An answer to be scored: to a question, or to a whole conversation."""

    question: str | None = None
    messages: list[SaidBefore] = Field(default=[], max_length=4096)
    answer: str

    @model_validator(mode="after")
    def _one_of_both(self) -> Item:
        if (self.question is None) == (not self.messages):
            raise ValueError("give either `question` or `messages`")
        return self

    def read(self) -> Answered:
        """Return the answer with what it answers."""
        asked = (
            [SaidBefore(role="user", content=self.question)] if self.question is not None else self.messages
        )
        return Answered(tuple(Message(each.role, each.content) for each in asked), self.answer)


class ScoreRequest(Body):
    """The body of a call."""

    items: list[Item] = Field(min_length=1, max_length=MOST_ITEMS)


class RewardService:
    """Scores answers."""

    def __init__(self, about: Mapping[str, Json], batches: Batches, seconds: float) -> None:
        """Tell callers `about` the model, and let a call take `seconds`, its time in the queue included."""
        self._about = dict(about)
        self._batches = batches
        self._seconds = seconds

    def routes(self) -> Sequence[Route]:
        """Return what it answers."""
        return (
            Route("GET", "/health", self.health),
            Route("GET", "/v1/model", self.model),
            Route("POST", "/v1/score", self.score),
        )

    async def health(self, call: Call) -> Answer:
        """Return that it serves, and how much."""
        held = self.under_way
        return Answer({"status": "ok", "under_way": held, "room": self._batches.room - held})

    async def model(self, call: Call) -> Answer:
        """Return what scores here."""
        return Answer(self._about)

    async def score(self, call: Call) -> Answer:
        """Return a score for each answer, or why it is ungraded."""
        request = read_body(ScoreRequest, call.body)
        if len(request.items) > self._batches.room:
            raise wrong(
                f"`items`: this server holds {self._batches.room:,} answers at once. Send fewer in a call.",
                "items",
            )
        try:
            scores = await self._batches.scored([item.read() for item in request.items], self._seconds)
        except Full as full:
            raise busy(str(full)) from None
        except TimeoutError:
            raise Refusal(504, f"No score within {self._seconds:g} s.", None, "timeout") from None
        rows = [score.row() for score in scores]
        return Answer({"model": self._about["name"], "weights": self._about["weights"], "results": rows})

    @property
    def under_way(self) -> int:
        """How many answers wait or are being scored."""
        return self._batches.held
