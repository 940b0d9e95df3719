"""The process that holds worlds for another one, which starts it (`pool.py`).

It ends when the other side closes the socket or is gone, after it has closed the worlds that are open.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from kapelle.environment import Environment
from kapelle.errors import EpisodeError
from kapelle.rollout.bounded_worlds import open_world
from kapelle.rollout.workers.session import Frames, OpenSessions, WorkerSession, error_form, pack
from kapelle.runtime import interrupts
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.event_loop import HookedAwaitable, run_async
from kapelle.runtime.machine import raise_descriptor_limit
from kapelle.runtime.process_tree import SharedStatus, end_with_parent
from kapelle.runtime.wire.worlds import VERSION, task_from
from kapelle.setup.environment_forms import environment_from

BEAT = 0.5
"""Seconds between two signs of life."""
LEAVING = 5.0
"""Seconds that worlds have to close after the other process has gone."""
CHUNK = 1 << 16
"""Bytes that are read at a time."""


def main(descriptor: int, pulse: int, parent: int) -> None:
    """Serve worlds over a socket until its other side is closed, or process `parent` has ended."""
    for number in interrupts.SIGNALS:  # they ask the other process, which then closes the socket
        signal.signal(number, signal.SIG_IGN)
    server = _Server(socket.socket(fileno=descriptor), SharedStatus(pulse))
    interrupts.commands.append(server)  # the watchdog may end this process where a world cannot be broken off
    raise_descriptor_limit()
    end_with_parent(parent, partial(time.sleep, LEAVING))  # while worlds close
    threading.Thread(target=server.live, name="kapelle-pulse", daemon=True).start()
    run_async(server.serve)


class _Server:
    """Worlds by the number of their session."""

    def __init__(self, connection: socket.socket, pulse: SharedStatus) -> None:
        self._connection, self._pulse = connection, pulse
        self._sessions = OpenSessions()
        self._environment: Environment | None = None
        self._patience = Patience()
        self._left: float | None = None
        """When the other side left."""

    def live(self) -> None:
        """Give signs of life; end this process if worlds keep it running after the other one has gone."""
        while True:
            self._pulse.beat()
            if self._left is not None and time.monotonic() - self._left > LEAVING:
                os._exit(1)
            time.sleep(BEAT)

    async def serve(self) -> None:
        """Answer until the other side has left, then close all worlds."""
        reader, writer = await asyncio.open_connection(sock=self._connection)
        frames, calls = Frames(), set[asyncio.Task[None]]()
        with suppress(ConnectionError):
            while data := await reader.read(CHUNK):
                for question in frames.feed(data):
                    task = asyncio.create_task(self._answer(question, writer))
                    calls.add(task)
                    task.add_done_callback(calls.discard)
        self._left = time.monotonic()
        await asyncio.gather(
            *(session.close() for session in self._sessions.open.values()), return_exceptions=True
        )
        with suppress(OSError):
            writer.close()

    async def _answer(self, question: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        answer: dict[str, Any] = {"id": question["id"]}
        try:
            work = self._work(question)
            number = question.get("session", 0)
            answer["value"] = await HookedAwaitable(
                work, partial(self._pulse.enter, number), partial(self._pulse.enter, 0)
            )
        except BaseException as error:  # noqa: BLE001 - raised in the process that waits for the answer
            answer["error"] = error_form(error)
        try:
            frame = pack(answer)
        except EpisodeError as error:
            frame = pack({"id": question["id"], "error": error_form(error)})
        with suppress(OSError):
            writer.write(frame)

    async def _work(self, question: Mapping[str, Any]) -> object:
        call, number = question["call"], question.get("session", 0)
        if call == "serve":
            if question["version"] != VERSION:
                raise EpisodeError(f"it speaks version {VERSION} and was asked for {question['version']}")
            self._patience = Patience(**question["patience"])
            self._environment = environment_from(question["environment"])
            return None
        if self._environment is None:  # the other process was told why, and ends this one
            await asyncio.Event().wait()
        if call == "reset":
            assert self._environment is not None
            begun = WorkerSession(open_world, self._environment, self._patience, question["agents"])
            return await self._sessions.begin(number, begun, task_from(question["task"]), question["seed"])
        return await self._sessions.answer(number, question)
