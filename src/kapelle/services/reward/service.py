"""The routes of the reward server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field, model_validator

from kapelle.services.http.application import Answer, Call, Route
from kapelle.services.http.bodies import Body, read_body
from kapelle.services.http.refusals import Refusal, busy, wrong
from kapelle.services.reward.batches import Batches, Full
from kapelle.services.reward.scores import MOST_ITEMS, Answered, Role
from kapelle.types import Json, Message


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
