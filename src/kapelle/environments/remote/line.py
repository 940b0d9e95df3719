"""One open stream to an environment server: questions go out, answers come in, and its end is noticed.

A thread reads what arrives, so that answers do not wait for anybody's event loop; any thread may ask.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from queue import SimpleQueue
from typing import Any

import grpc

from kapelle.environments.elsewhere import WorkerLost, error_from
from kapelle.errors import EpisodeError
from kapelle.wire import LARGEST
from kapelle.wire import environment_v1_pb2 as pb


class Busy(Exception):
    """The server has no room now, or is about to end."""


class Line:
    """Questions about any number of sessions; those that were opened here end with it."""

    def __init__(self, stub: Any, address: str, metadata: Sequence[tuple[str, str]]) -> None:
        """Open the stream; whether somebody answers is known by the first answer."""
        self._address = address
        self._guard = threading.Lock()
        self._numbers = count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._outgoing: SimpleQueue[pb.StreamQuestion | None] = SimpleQueue()
        self.lost: str | None = None
        """How it ended, once it has."""
        self._call = stub.Stream(iter(self._outgoing.get, None), metadata=metadata)
        threading.Thread(target=self._read, name="kapelle-remote", daemon=True).start()

    def ask(self, **question: Any) -> Future[Any]:
        """Send one question by its kind (`act=…`); the answer's message, or what the environment raised, or WorkerLost."""
        number = next(self._numbers)
        asked = pb.StreamQuestion(number=number, **question)
        if asked.ByteSize() > LARGEST:  # sent, it would end the whole stream
            raise EpisodeError(f"A message to the environment server has more than {LARGEST:,} bytes.")
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # who waits may go away; the answer comes none the less
        with self._guard:
            if self.lost is not None:
                raise WorkerLost(self.lost, blamed=False)
            self._waiting[number] = future
        self._outgoing.put(asked)
        return future

    def close(self) -> None:
        """End the stream and all sessions that were opened here."""
        self._call.cancel()

    def _read(self) -> None:
        how = "it ended the stream"
        try:
            for answer in self._call:
                with self._guard:
                    future = self._waiting.pop(answer.number, None)
                if future is not None:
                    _settle(future, answer)
        except grpc.RpcError as error:
            how = f"{error.code().name}: {error.details()}"
        finally:
            self._end(f"the environment server at {self._address} is gone ({how})")

    def _end(self, how: str) -> None:
        with self._guard:
            self.lost = how
            left, self._waiting = list(self._waiting.values()), {}
        self._outgoing.put(None)
        for future in left:
            future.set_exception(WorkerLost(how, blamed=False))


def _settle(future: Future[Any], answer: pb.StreamAnswer) -> None:
    kind = answer.WhichOneof("answer")
    if kind == "error":
        future.set_exception(raised(answer.error.code, answer.error.message))
    elif kind is None:
        future.set_exception(
            WorkerLost("the environment server gave an answer that cannot be read", blamed=True)
        )
    else:
        future.set_result(getattr(answer, kind))


def raised(code: str, message: str) -> BaseException:
    """Return what a status code and its message stand for; see the contract."""
    if code == "ABORTED":
        kind, _, said = message.partition(": ")
        return error_from([kind, said])
    if code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
        return Busy(message)
    if code in ("DATA_LOSS", "NOT_FOUND"):
        return WorkerLost(message, blamed=code == "DATA_LOSS")
    return error_from(["EpisodeError", f"The environment server refused a call ({code}): {message}"])
