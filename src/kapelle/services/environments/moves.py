"""The moves of one session, each made once however often it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kapelle.services.grpc.refusals import Refused, wrong
from kapelle.wire import environment_v1_pb2 as pb


class Moves:
    """What a session was asked and answered last; for one event loop.

    A caller whose connection breaks cannot know whether its move was made. Sent again with its number, it is answered
    as the first time, an error included; the world does not see it again.
    """

    def __init__(self) -> None:
        self._made = 0
        self._asked = b""
        self._answer: _Once | None = None
        self._outcome: tuple[int, _Once] | None = None

    async def act(
        self, asked: pb.ActRequest, make: Callable[[], Coroutine[Any, Any, pb.ActReply]]
    ) -> pb.ActReply:
        """Make a move, or return what it brought when it was made; Refused where its number is neither."""
        if not asked.HasField("number"):
            self._made, self._answer = self._made + 1, None
            return await make()
        body = asked.SerializeToString(deterministic=True)
        if asked.number == self._made and self._answer is not None:
            if body != self._asked:
                raise wrong(f"Move {asked.number} was made already, and was another one.")
        elif asked.number == self._made + 1:
            self._made, self._asked, self._answer = asked.number, body, _Once(make)
        else:
            raise Refused(
                "FAILED_PRECONDITION",
                f"This is move {asked.number}; the session has made {self._made}, and takes the last one again "
                "(where it had a number) or the next.",
            )
        reply: pb.ActReply = await self._answer.result()
        return reply

    async def outcome(self, ask: Callable[[], Coroutine[Any, Any, pb.Outcome]]) -> pb.Outcome:
        """Return how the episode ended: asked of the world once after a move."""
        if self._outcome is None or self._outcome[0] != self._made:
            self._outcome = self._made, _Once(ask)
        outcome: pb.Outcome = await self._outcome[1].result()
        return outcome


class _Once:
    """Work that is done once, for all who ask for its result; broken off when none of them is left to wait."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._work = asyncio.create_task(work())
        self._work.add_done_callback(_looked_at)
        self._waiting = 0

    async def result(self) -> Any:
        self._waiting += 1
        try:
            return await asyncio.shield(self._work)
        except asyncio.CancelledError:
            if self._work.cancelled():
                raise Refused(
                    "NOT_FOUND", "Whoever asked first went away meanwhile: the session is closed."
                ) from None
            raise
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._work.cancel()


def _looked_at(work: asyncio.Task[Any]) -> None:
    """Take note of an error that nobody waits for any more, or Python would print it."""
    if not work.cancelled():
        work.exception()
