"""The reward server's methods over gRPC, as proto/kapelle/wire/reward_v1.proto has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import get_args

import grpc

from kapelle.services.grpc.refusals import Refused, busy, wrong
from kapelle.services.reward.scores import MOST_ITEMS, Answered, Role, Score
from kapelle.services.reward.service import Batches, Full
from kapelle.types import Json, Message
from kapelle.wire import reward_v1_pb2 as wire
from kapelle.wire import reward_v1_pb2_grpc as methods


class GrpcReward(methods.RewardServicer):
    """Scores answers; a `GrpcService`."""

    name = "kapelle.reward.v1.Reward"

    def __init__(self, about: Mapping[str, Json], batches: Batches, seconds: float) -> None:
        """Tell callers `about` the model, and let a call take `seconds`, its time in the queue included."""
        self._about, self._batches, self._seconds = dict(about), batches, seconds

    def register(self, server: grpc.aio.Server) -> None:
        """Add its methods to a server."""
        methods.add_RewardServicer_to_server(self, server)

    async def settle(self) -> None:
        """Return: calls are all there is, and the server waits for those."""

    async def Score(self, request: wire.ScoreRequest, context: object) -> wire.ScoreReply:  # noqa: N802 - as in the contract
        """Return a score for each answer, or why it is ungraded."""
        most = min(MOST_ITEMS, self._batches.room)
        if not 1 <= len(request.items) <= most:
            raise wrong(f"`items` holds {len(request.items)} answers; a call has 1 to {most:,}.")
        answers = [_read(k, item) for k, item in enumerate(request.items)]
        try:
            scores = await self._batches.scored(answers, self._seconds)
        except Full as full:
            raise busy(str(full)) from None
        except TimeoutError:
            raise Refused("DEADLINE_EXCEEDED", f"No score within {self._seconds:g} s.") from None
        results = [_written(score) for score in scores]
        return wire.ScoreReply(
            model=str(self._about["name"]), weights=str(self._about["weights"]), results=results
        )

    async def Describe(self, request: wire.DescribeRequest, context: object) -> wire.Model:  # noqa: N802
        """Return what scores here."""
        return wire.Model(
            name=str(self._about["name"]), weights=str(self._about["weights"]), about=json.dumps(self._about)
        )


def _read(place: int, item: wire.Item) -> Answered:
    if item.HasField("question") == bool(item.messages):
        raise wrong(f"`items[{place}]`: give either `question` or `messages`.")
    for message in item.messages:
        if message.role not in get_args(Role):
            raise wrong(f"`items[{place}]`: the role of a message is one of {', '.join(get_args(Role))}.")
    if item.messages:
        return Answered(tuple(Message(each.role, each.content) for each in item.messages), item.answer)
    return Answered((Message("user", item.question),), item.answer)


def _written(score: Score) -> wire.Result:
    if score.value is None or score.logit is None:
        return wire.Result(ungraded=score.reason)
    return wire.Result(score=wire.Score(score=score.value, logit=score.logit))
