"""Run a process that holds episode states for the process that started it (`pool.py`).

When the process that started it closes the socket or ends, this process closes its open episode states and exits.
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
from kapelle.rollout.bounded_states import open_state
from kapelle.rollout.workers.session import Frames, OpenSessions, WorkerSession, error_form, pack
from kapelle.runtime import interrupts
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.event_loop import HookedAwaitable, run_async
from kapelle.runtime.machine import raise_descriptor_limit
from kapelle.runtime.process_tree import SharedStatus, end_with_parent
from kapelle.runtime.wire.worlds import VERSION, task_from
from kapelle.setup.environment_forms import environment_from

BEAT = 0.5
"""Time in seconds between two heartbeats."""
LEAVING = 5.0
"""Maximum time in seconds for closing episode states after the other process has ended."""
CHUNK = 1 << 16
"""Maximum number of bytes that are read at once."""


def main(descriptor: int, pulse: int, parent: int) -> None:
    """Serve requests over a socket until the other side of the socket is closed or the process `parent` ends."""
    for number in interrupts.SIGNALS:  # the other process handles them and closes the socket
        signal.signal(number, signal.SIG_IGN)
    server = _Server(socket.socket(fileno=descriptor), SharedStatus(pulse))
    interrupts.commands.append(server)  # the watchdog may end a call that cannot be interrupted
    raise_descriptor_limit()
    end_with_parent(parent, partial(time.sleep, LEAVING))  # states close in this time
    threading.Thread(target=server.live, name="kapelle-pulse", daemon=True).start()
    run_async(server.serve)


class _Server:
    """A server for episode states, which are identified by the numbers of their sessions."""

    def __init__(self, connection: socket.socket, pulse: SharedStatus) -> None:
        self._connection, self._pulse = connection, pulse
        self._sessions = OpenSessions()
        self._environment: Environment | None = None
        self._patience = Patience()
        self._left: float | None = None
        """Time at which the other side closed the socket, or None."""

    def live(self) -> None:
        """Send heartbeats, and end this process if the episode states do not close in time."""
        while True:
            self._pulse.beat()
            if self._left is not None and time.monotonic() - self._left > LEAVING:
                os._exit(1)
            time.sleep(BEAT)

    async def serve(self) -> None:
        """Process requests until the other side closes the socket, and then close all episode states."""
        reader, writer = await asyncio.open_connection(sock=self._connection)
        frames, calls = Frames(), set[asyncio.Task[None]]()
        with suppress(ConnectionError):
            while data := await reader.read(CHUNK):
                for request in frames.feed(data):
                    task = asyncio.create_task(self._answer(request, writer))
                    calls.add(task)
                    task.add_done_callback(calls.discard)
        self._left = time.monotonic()
        await asyncio.gather(
            *(session.close() for session in self._sessions.open.values()), return_exceptions=True
        )
        with suppress(OSError):
            writer.close()

    async def _answer(self, request: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            work = self._work(request)
            number = request.get("session", 0)
            answer["value"] = await HookedAwaitable(
                work, partial(self._pulse.enter, number), partial(self._pulse.enter, 0)
            )
        except BaseException as error:  # noqa: BLE001 - raised in the other process
            answer["error"] = error_form(error)
        try:
            frame = pack(answer)
        except EpisodeError as error:
            frame = pack({"id": request["id"], "error": error_form(error)})
        with suppress(OSError):
            writer.write(frame)

    async def _work(self, request: Mapping[str, Any]) -> object:
        call, number = request["call"], request.get("session", 0)
        if call == "serve":
            if request["version"] != VERSION:
                raise EpisodeError(
                    f"it has version {VERSION} of the protocol, but the request has version {request['version']}"
                )
            self._patience = Patience(**request["patience"])
            self._environment = environment_from(request["environment"])
            return None
        if self._environment is None:  # the other process has the error and ends this one
            await asyncio.Event().wait()
        if call == "reset":
            assert self._environment is not None
            begun = WorkerSession(open_state, self._environment, self._patience, request["agents"])
            return await self._sessions.begin(number, begun, task_from(request["task"]), request["seed"])
        return await self._sessions.answer(number, request)
