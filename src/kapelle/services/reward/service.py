"""Implements the reward server, in which one thread scores the answers of all callers in batches. The server supports HTTP and gRPC.

with serve_reward(scorer, Binding(), RewardLimits()) as server:
    print(server.url)
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, get_args

from pydantic import Field, model_validator
from starlette.routing import Route

from kapelle.runtime.wire import reward_v1_pb2 as wire
from kapelle.runtime.wire import reward_v1_pb2_grpc as methods
from kapelle.services.binding import Binding, log_failure
from kapelle.services.grpc import CallRejected, Caps, GrpcServer, GrpcService
from kapelle.services.http import MOST_BYTES, Application, Call, HttpServer, JsonAnswer, route
from kapelle.services.request_errors import Body, RequestError, busy, read_body, wrong
from kapelle.services.reward.scores import MOST_ITEMS, Answered, Role, Score, Scorer, ungraded
from kapelle.types import Json, Message

# -------- Batches
# A batch does not wait until it is full. While one batch is scored, other answers arrive; those that are waiting when
# it is done form the next batch.

ROLES = get_args(Role)
FAILED = "The model failed on this answer; see the service's log."


class Full(Exception):
    """Raised if the queue of answers is full."""


@dataclass(eq=False, slots=True)
class _ScoredCall:
    answers: Sequence[Answered]
    future: Future[list[Score]] = field(default_factory=Future)
    begun: int = 0
    """The number of answers of the call that have been taken into a batch."""
    scores: list[Score] = field(default_factory=list)


class Batches:
    """A context manager that scores the answers of all callers in batches."""

    def __init__(self, score: Callable[[Sequence[Answered]], Sequence[Score]], most: int, room: int) -> None:
        """Score at most `most` answers together, and hold at most `room` answers that wait or are being scored."""
        self._score, self._most, self.room = score, most, room
        self._waiting: deque[_ScoredCall] = deque()
        self.held = 0
        """The number of answers that wait or are being scored."""
        self._over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="kapelle-reward", daemon=True)

    def submit(self, answers: Sequence[Answered]) -> Future[list[Score]]:
        """Return a future with a score for each answer. Raises `Full` if there is no room.

        If the future is cancelled, its answers are removed from the queue.
        """
        call = _ScoredCall(answers)
        with self._changed:
            if self.held + len(answers) > self.room:
                raise Full(f"{self.held} of at most {self.room} answers are waiting. Try again later.")
            self.held += len(answers)
            self._waiting.append(call)
            self._changed.notify()
        call.future.add_done_callback(lambda _: self._forget(call))
        return call.future

    async def scored(self, answers: Sequence[Answered], seconds: float) -> list[Score]:
        """Return a score for each answer.

        Raises `Full`, or TimeoutError after `seconds`. If the call is cancelled, its room in the queue is freed.
        """
        scores = self.submit(answers)
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(scores)

    def _forget(self, call: _ScoredCall) -> None:
        """Free the room of a call that was cancelled while it waited."""
        with self._changed:
            if call in self._waiting:
                self._waiting.remove(call)
                self.held -= len(call.answers) - call.begun

    def _work(self) -> None:
        while batch := self._next():
            scores = self._scored([call.answers[k] for call, k in batch])
            with self._changed:
                self.held -= len(batch)
            for (call, _), score in zip(batch, scores, strict=True):
                call.scores.append(score)
                if len(call.scores) == len(call.answers):
                    with suppress(InvalidStateError):  # cancelled in the meantime
                        call.future.set_result(call.scores)

    def _next(self) -> list[tuple[_ScoredCall, int]]:
        """Return the answers of the next batch as pairs of a call and a position. The result is empty once the object is closed."""
        batch: list[tuple[_ScoredCall, int]] = []
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
        """Return a score for each answer.

        If a batch fails, each answer is scored alone, so that an invalid answer does not affect the others.
        """
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


# -------- Calls


class PreviousMessage(Body):
    """A message of the conversation before the answer."""

    role: Role
    content: str


class ScoredAnswer(Body):
    """An answer to be scored, together with a question or a whole conversation."""

    question: str | None = None
    messages: list[PreviousMessage] = Field(default=[], max_length=4096)
    answer: str

    @model_validator(mode="after")
    def _one_of_both(self) -> ScoredAnswer:
        if (self.question is None) == (not self.messages):
            raise ValueError("give either `question` or `messages`")
        return self


class ScoreRequest(Body):
    """The body of a call to score answers."""

    items: list[ScoredAnswer] = Field(min_length=1, max_length=MOST_ITEMS)


class RewardService(methods.RewardServicer, GrpcService):
    """A service that scores answers over HTTP (with `routes`) and over gRPC.

    The gRPC service is defined in `proto/kapelle/runtime/wire/reward_v1.proto`.
    """

    name = "kapelle.reward.v1.Reward"

    def __init__(self, about: Mapping[str, Json], batches: Batches, seconds: float) -> None:
        """Create the service.

        The argument `about` describes the model to callers. The argument `seconds` limits the duration of a call,
        including the time in the queue.
        """
        self._about, self.batches, self._seconds = dict(about), batches, seconds

    # Over HTTP.

    def routes(self) -> Sequence[Route]:
        """Return the routes of the service."""
        return (
            route("GET", "/health", self.health),
            route("GET", "/v1/model", self.model),
            route("POST", "/v1/score", self.score),
        )

    async def health(self, call: Call) -> JsonAnswer:
        """Return the status of the service, and the number of additional answers that it accepts."""
        held = self.batches.held
        return JsonAnswer({"status": "ok", "under_way": held, "room": self.batches.room - held})

    async def model(self, call: Call) -> JsonAnswer:
        """Return the description of the model."""
        return JsonAnswer(self._about)

    async def score(self, call: Call) -> JsonAnswer:
        """Return a score for each answer, or the reason why the answer is ungraded."""
        request = read_body(ScoreRequest, call.body)
        if len(request.items) > self.batches.room:
            raise wrong(
                f"`items`: this server accepts at most {self.batches.room:,} answers at the same time. Send "
                "fewer in one call.",
                "items",
            )
        answers = []
        for item in request.items:
            messages = tuple(Message(each.role, each.content) for each in item.messages)
            answers.append(Answered(messages or (Message("user", item.question or ""),), item.answer))
        try:
            scores = await self.batches.scored(answers, self._seconds)
        except Full as full:
            raise busy(str(full)) from None
        except TimeoutError:
            raise RequestError(
                504, f"There was no score within {self._seconds:g} s.", None, "timeout"
            ) from None
        rows = [score.row() for score in scores]
        return JsonAnswer({"model": self._about["name"], "weights": self._about["weights"], "results": rows})

    # Over gRPC.

    def register(self, server: Any) -> None:
        """Add the methods of the service to a server."""
        methods.add_RewardServicer_to_server(self, server)

    async def Score(self, request: wire.ScoreRequest, context: object) -> wire.ScoreReply:
        """Return a score for each answer, or the reason why the answer is ungraded."""
        most = min(MOST_ITEMS, self.batches.room)
        if not 1 <= len(request.items) <= most:
            raise CallRejected(
                "INVALID_ARGUMENT",
                f"`items` has {len(request.items)} answers, but a call may have 1 to {most:,}.",
            )
        answers: list[Answered] = []
        for k, item in enumerate(request.items):
            messages = tuple(Message(each.role, each.content) for each in item.messages)
            if item.HasField("question") == bool(messages):
                raise CallRejected("INVALID_ARGUMENT", f"`items[{k}]`: give either `question` or `messages`.")
            if not all(each.role in ROLES for each in messages):
                why = f"`role` must be one of {', '.join(ROLES)}."
                raise CallRejected("INVALID_ARGUMENT", f"`items[{k}]`: {why}")
            answers.append(Answered(messages or (Message("user", item.question),), item.answer))
        try:
            scores = await self.batches.scored(answers, self._seconds)
        except Full as full:
            raise CallRejected("RESOURCE_EXHAUSTED", str(full)) from None
        except TimeoutError:
            raise CallRejected(
                "DEADLINE_EXCEEDED", f"There was no score within {self._seconds:g} s."
            ) from None
        results = [
            wire.Result(ungraded=score.reason)
            if score.value is None or score.logit is None
            else wire.Result(score=wire.Score(score=score.value, logit=score.logit))
            for score in scores
        ]
        return wire.ScoreReply(
            model=str(self._about["name"]), weights=str(self._about["weights"]), results=results
        )

    async def Describe(self, request: wire.DescribeRequest, context: object) -> wire.Model:
        """Return the description of the model."""
        return wire.Model(
            name=str(self._about["name"]), weights=str(self._about["weights"]), about=json.dumps(self._about)
        )


# -------- The server


@dataclass(frozen=True, slots=True)
class RewardLimits:
    """The limits of a reward server."""

    answers: int = 8192
    """The maximum number of answers that wait or are in progress. Further calls receive the status 429."""
    batch: int = 64
    """The maximum number of answers that are scored together."""
    seconds: float = 600.0
    """The maximum duration of one call in seconds, including the time in the queue."""


@dataclass(frozen=True, slots=True)
class RunningRewardServer:
    """A running reward server."""

    url: str
    service: RewardService
    http: HttpServer
    grpc: GrpcServer | None

    def drain(self, seconds: float) -> bool:
        """Stop accepting calls, finish the accepted calls, and return whether this took at most `seconds`."""
        servers = [each for each in (self.http, self.grpc) if each is not None]
        with ThreadPoolExecutor(len(servers)) as both:
            return all(list(both.map(lambda server: server.drain(seconds), servers)))


@contextmanager
def serve_reward(
    scorer: Scorer, binding: Binding, limits: RewardLimits, grpc_port: int | None = None
) -> Iterator[RunningRewardServer]:
    """Serve a scorer while the block runs. If `grpc_port` is given, the scorer is also served over gRPC (0 chooses a free port).

    Raises ConfigError if a port is in use or an extra is missing.
    """
    with ExitStack() as closing:
        batches = closing.enter_context(Batches(scorer.score, limits.batch, limits.answers))
        service = RewardService(scorer.about, batches, limits.seconds)
        http = closing.enter_context(HttpServer(binding, Application(binding, service.routes())))
        grpc_server = None
        if grpc_port is not None:
            beside, caps = replace(binding, port=grpc_port), Caps(message_bytes=MOST_BYTES)
            grpc_server = closing.enter_context(GrpcServer(beside, [service], caps))
        yield RunningRewardServer(http.url, service, http, grpc_server)
