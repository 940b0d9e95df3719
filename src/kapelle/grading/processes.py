"""Processes that can be killed, for work on hostile text that cannot be bounded from inside.

A server process imports what the work needs once and forks a child for every question, so a child starts
in milliseconds, sees nothing of the last one, and can be killed without cost (`fork_server` is its side).
Signals and threads cannot do this: `signal.alarm` raises outside the main thread, and neither stops a
regular expression or an integer power that runs in C.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, Protocol

from kapelle.runtime.clock import SuspendAwareClock, wait_readable
from kapelle.types import Json

MAX_REPLY_BYTES = 1 << 20


class GaveUp(Exception):
    """The work was stopped or failed in itself; says nothing about the text it was done on."""


class TooCostly(GaveUp):
    """What was asked takes more than any question may, whatever else the machine does."""


class Answering(Protocol):
    """What a grader asks for work that cannot be bounded from inside."""

    def ask(self, question: Json) -> Json:
        """Return the answer to a question, or raise GaveUp, TooCostly where the question is the reason."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """What one question may cost."""

    cpu_s: float = 0.8
    """Seconds of CPU: the limit that counts, the same on a busy machine."""
    wall_s: float = 120.0
    """Seconds from fork to answer, for a child that hangs without computing: so many that no crowded machine reaches them."""
    start_s: float = 60.0
    """Seconds that a server may take to import what it needs, once."""
    memory_bytes: int = 1 << 30
    """Address space of a child. Not enforced by macOS."""


class KillableProcesses(AbstractContextManager["KillableProcesses"]):
    """A pool of fork servers that run one worker module; any thread may ask.

    The module is run as a program and calls `fork_server.serve`. Servers start when first needed, at most
    `size` of them, and end when the pool is closed, collected or its process dies.
    """

    def __init__(self, module: str, size: int = 2, limits: AnswerLimits | None = None) -> None:
        assert size >= 1, "a pool has a process at least"
        self._module = module
        self._limits = limits or AnswerLimits()
        # None stands for a server yet to start. Last in, first out: a quiet run starts one server only.
        self._idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._end = weakref.finalize(self, _end_own, self._running, os.getpid())

    def warm(self) -> None:
        """Start one server now, so that the first question does not wait for its imports."""
        server = self._idle.get()
        try:
            server = self._live(server)
        finally:
            self._idle.put(server)

    def ask(self, question: Json) -> Json:
        """Return the worker's answer to a question; waits while every server is busy.

        Raises TooCostly when it takes longer than `cpu_s`, needs more than `memory_bytes`, or fails, GaveUp when the clock
        reaches `wall_s` first, or its process is gone.
        """
        server = self._idle.get()
        try:
            server = self._live(server)
            reply = self._exchange(server, question)
        except GaveUp:
            self._kill(server)
            server = None
            raise
        finally:
            self._idle.put(server)
        if "answer" not in reply:
            raise (TooCostly if reply.get("costly") else GaveUp)(str(reply["gave_up"]))
        return reply["answer"]

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every server; a later question starts new ones."""
        _end_all(self._running)

    def _live(self, server: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes]:
        if server is not None:
            if server.poll() is None:
                return server
            self._kill(server)
        # The child imports what this process would, and gets nothing else of its environment.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        started = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
            [sys.executable, "-P", "-m", self._module, str(self._limits.memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._running.add(started)
        try:
            ready = _read_line(started, self._limits.start_s)
        except GaveUp:
            self._kill(started)
            raise
        assert ready == "ready", "a server says that it is ready first"
        return started

    def _exchange(self, server: subprocess.Popen[bytes], question: Json) -> dict[str, Json]:
        assert server.stdin is not None
        limits = {"cpu_s": self._limits.cpu_s, "wall_s": self._limits.wall_s}
        line = json.dumps({**limits, "question": question}) + "\n"
        try:
            server.stdin.write(line.encode())
            server.stdin.flush()
        except OSError as problem:
            raise GaveUp(f"The process that grades is gone ({problem}).") from problem
        # The server stops its child in time; the grace is for a server that is itself stuck.
        reply = _read_line(server, self._limits.wall_s + 2.0)
        assert isinstance(reply, dict), "a server answers with an object"
        return reply

    def _kill(self, server: subprocess.Popen[bytes] | None) -> None:
        if server is not None:
            _end(server)
            self._running.discard(server)


def _read_line(server: subprocess.Popen[bytes], limit_s: float) -> Json:
    assert server.stdout is not None
    data, clock = b"", SuspendAwareClock()
    while not data.endswith(b"\n"):
        if not wait_readable(server.stdout, clock, limit_s):
            raise GaveUp(f"The process that grades did not answer within {limit_s:g} s.")
        part = os.read(server.stdout.fileno(), 65536)
        if not part or len(data) > MAX_REPLY_BYTES:
            raise GaveUp("The process that grades ended without an answer.")
        data += part
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise GaveUp("The process that grades answered something that is not JSON.") from problem


def _end_own(servers: set[subprocess.Popen[bytes]], owner: int) -> None:
    # A fork of this process inherits the pool and not its servers.
    if os.getpid() == owner:
        _end_all(servers)


def _end_all(servers: set[subprocess.Popen[bytes]]) -> None:
    while servers:
        _end(servers.pop())


def _end(server: subprocess.Popen[bytes]) -> None:
    # A new session: what the server has forked is in its group.
    try:
        os.killpg(server.pid, 9)
    except ProcessLookupError:
        server.poll()
    server.wait()
    streams: tuple[IO[bytes] | None, ...] = (server.stdin, server.stdout)
    for stream in streams:
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                continue
