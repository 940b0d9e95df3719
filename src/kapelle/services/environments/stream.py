"""One stream of questions about sessions: many under way at once, answered as they are done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from kapelle.services.grpc.refusals import Refused, busy, leaving
from kapelle.services.log import log_failure
from kapelle.wire import LARGEST
from kapelle.wire import environment_v1_pb2 as pb

UNDER_WAY = 4096
"""Questions of one stream that are not answered yet."""
Answered = tuple[str, Any]
"""The kind of an answer, and its message."""


class OneStream:
    """The questions of one caller and the sessions that it opened here."""

    def __init__(self, answer: Callable[[pb.StreamQuestion, OneStream], Awaitable[Answered]]) -> None:
        """Take what answers one question."""
        self._answer = answer
        self.sessions: set[str] = set()
        self._done: asyncio.Queue[pb.StreamAnswer | None] = asyncio.Queue()
        self._asked: set[asyncio.Task[None]] = set()
        self._unsent = 0
        self._reading: asyncio.Task[None] | None = None
        self._ended = False

    def end(self) -> None:
        """Read no more questions; the stream ends when those that were read are answered."""
        self._ended = True
        if self._reading is not None:
            self._reading.cancel()

    async def answers(self, questions: AsyncIterator[pb.StreamQuestion]) -> AsyncIterator[pb.StreamAnswer]:
        """Yield answers until there are no more questions and all are answered; Refused where the server ends first."""
        self._reading = asyncio.create_task(self._read(questions))
        try:
            while (answer := await self._done.get()) is not None:
                yield answer
                self._unsent -= 1
            if self._ended:
                raise leaving()
            self._reading.result()  # what was no question ends the stream with that error
        finally:
            self._reading.cancel()
            for task in self._asked:
                task.cancel()

    async def _read(self, questions: AsyncIterator[pb.StreamQuestion]) -> None:
        try:
            async for question in questions:
                self._unsent += 1
                if self._unsent > UNDER_WAY:
                    full = busy(
                        f"{UNDER_WAY:,} questions of this stream are not answered yet. Ask again later."
                    )
                    self._done.put_nowait(_refusal(question.number, full))
                    continue
                task = asyncio.create_task(self._one(question))
                self._asked.add(task)
                task.add_done_callback(self._asked.discard)
        finally:
            if self._asked:
                await asyncio.wait(self._asked)
            self._done.put_nowait(None)

    async def _one(self, question: pb.StreamQuestion) -> None:
        try:
            kind, message = await self._answer(question, self)
            answer = pb.StreamAnswer(number=question.number, **{kind: message})
            if answer.ByteSize() > LARGEST:  # sent, it would end the whole stream
                raise Refused("ABORTED", f"EpisodeError: The answer has more than {LARGEST:,} bytes.")
        except Refused as refused:
            answer = _refusal(question.number, refused)
        except Exception as error:
            log_failure("A question of a stream failed.", error)
            answer = _refusal(question.number, Refused("INTERNAL", "The service failed; its log says why."))
        self._done.put_nowait(answer)


def _refusal(number: int, refused: Refused) -> pb.StreamAnswer:
    return pb.StreamAnswer(number=number, error=pb.Error(code=refused.code, message=refused.message))
