"""Killable processes for work on untrusted input, which could otherwise take unlimited time.

A server process imports the required modules once and forks a child for every question. A child therefore starts in
milliseconds, has no state from earlier questions, and can be killed at no cost. Signals and threads do not have these
properties: `signal.alarm` raises an error outside the main thread, and neither signals nor threads can stop a regular
expression or an integer power that runs in C.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, NoReturn

from kapelle.runtime.clock import SuspendAwareClock, wait_readable
from kapelle.types import Json

MAX_REPLY_BYTES = 1 << 20


class ProcessFailed(Exception):
    """Raised if the work was stopped or failed for reasons that are independent of its input."""


class TooCostly(ProcessFailed):
    """Raised if a question exceeds the limits regardless of the load of the machine."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Limits on the work for one question."""

    cpu_s: float = 0.8
    """Maximum CPU time in seconds. This is the main limit, because CPU time is independent of the load of the machine."""
    wall_s: float = 120.0
    """Maximum time in seconds from the fork to the answer, for a child that hangs without computing. The default is much longer
    than a busy machine needs."""
    start_s: float = 60.0
    """Maximum time in seconds for the imports of a server process."""
    memory_bytes: int = 1 << 30
    """Maximum address space of a child in bytes. macOS does not enforce this limit."""


class KillableProcesses(AbstractContextManager["KillableProcesses"]):
    """A pool of fork servers that run one worker module; the pool can be used from any thread.

    The worker module is run as a program and calls `serve`. The pool starts at most `size` servers, each when it is first
    needed. The servers exit when the pool is closed or garbage-collected, or when the process that owns the pool exits.
    """

    def __init__(self, module: str, size: int = 2, limits: AnswerLimits | None = None) -> None:
        assert size >= 1, "a pool has a process at least"
        self._module = module
        self._limits = limits or AnswerLimits()
        # None stands for a server that has not started. Last in, first out: with few questions only one server starts.
        self._idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._end = weakref.finalize(self, _end_all, self._running, os.getpid())

    def warm(self) -> None:
        """Start one server immediately, so that the first question does not wait for the imports."""
        server = self._idle.get()
        try:
            server = self._live(server)
        finally:
            self._idle.put(server)

    def ask(self, question: Json) -> Json:
        """Return the answer of the worker to a question; the call waits while every server is busy.

        Raises TooCostly if the answer needs more CPU time than `cpu_s` or more memory than `memory_bytes`, or if the worker
        fails on the question. Raises ProcessFailed if the wall-clock time reaches `wall_s` first or the process has exited.
        """
        server = self._idle.get()
        try:
            server = self._live(server)
            assert server.stdin is not None
            limits = {"cpu_s": self._limits.cpu_s, "wall_s": self._limits.wall_s}
            line = json.dumps({**limits, "question": question}) + "\n"
            try:
                server.stdin.write(line.encode())
                server.stdin.flush()
            except OSError as problem:
                raise ProcessFailed(f"The grading process has ended ({problem}).") from problem
            # The server stops its child in time; the extra time is for a server that itself hangs.
            reply = _read_line(server, self._limits.wall_s + 2.0)
            assert isinstance(reply, dict), "a server replies with an object"
        except ProcessFailed:
            self._kill(server)
            server = None
            raise
        finally:
            self._idle.put(server)
        if "answer" not in reply:
            raise (TooCostly if reply.get("costly") else ProcessFailed)(str(reply["gave_up"]))
        return reply["answer"]

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop every server; a later question starts new servers."""
        _end_all(self._running, os.getpid())

    def _live(self, server: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes]:
        if server is not None:
            if server.poll() is None:
                return server
            self._kill(server)
        # Of this process's environment, the server gets only the import path.
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
        except ProcessFailed:
            self._kill(started)
            raise
        assert ready == "ready", "a server first reports that it is ready"
        return started

    def _kill(self, server: subprocess.Popen[bytes] | None) -> None:
        if server is not None:
            _end(server)
            self._running.discard(server)


def _read_line(server: subprocess.Popen[bytes], limit_s: float) -> Json:
    assert server.stdout is not None
    data, clock = b"", SuspendAwareClock()
    while not data.endswith(b"\n"):
        if not wait_readable(server.stdout, clock, limit_s):
            raise ProcessFailed(f"The grading process did not answer within {limit_s:g} s.")
        part = os.read(server.stdout.fileno(), 65536)
        if not part or len(data) > MAX_REPLY_BYTES:
            raise ProcessFailed("The grading process ended without an answer.")
        data += part
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise ProcessFailed("The grading process returned invalid JSON.") from problem


def _end_all(servers: set[subprocess.Popen[bytes]], owner: int) -> None:
    # A fork of this process inherits the pool but must not end the pool's servers.
    while servers and os.getpid() == owner:
        _end(servers.pop())


def _end(server: subprocess.Popen[bytes]) -> None:
    # The server has its own session, so its children are in its group.
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


# -------- Inside a server process: a loop that forks a child for every question

Answer = Callable[[Json], Json]

_SPARE_BYTES = 1 << 16
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals that kill a process when deeply nested input overflows its stack. In this case the question is the cause, not the
machine."""
# Work on text causes none of these audit events; a library that is tricked into causing one fails.
_FORBIDDEN_EVENTS = frozenset(
    {
        "os.system",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "subprocess.Popen",
        "socket.connect",
        "socket.bind",
        "os.remove",
        "os.rename",
        "os.kill",
        "ctypes.dlopen",
    }
)


def serve(answer: Answer) -> None:
    """Answer the questions on standard input, one JSON line for each question, until the input ends.

    The first argument of the program is the address space of a child in bytes. Every question runs in a forked child, which is
    stopped after `cpu_s` seconds of CPU time or `wall_s` seconds of wall-clock time.
    """
    memory = int(sys.argv[1])
    # The output of libraries must not mix with the replies.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    replies.write(b'"ready"\n')
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        replies.write(_in_child(answer, asked, memory, replies.fileno()) + b"\n")


def _in_child(answer: Answer, asked: dict[str, Json], memory: int, replies: int) -> bytes:
    cpu_s, wall_s = asked["cpu_s"], asked["wall_s"]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Only the server writes replies.
        os.close(reading)
        os.close(replies)
        # The signal's default action ends the process even while C code runs.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        _answer_and_exit(answer, asked["question"], writing, memory)
    os.close(writing)
    data, late, clock = b"", False, SuspendAwareClock()
    try:
        while not data.endswith(b"\n"):
            late = not wait_readable(reading, clock, wall_s)
            part = b"" if late else os.read(reading, _SPARE_BYTES)
            if not part:
                break
            data += part
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if late:
        # The clock depends on the machine's load, so the question is not to blame.
        return _gave_up(f"Grading takes longer than {wall_s:g} s.")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return _gave_up(f"Grading needs more than {cpu_s:g} s of CPU time.", costly=True)
    # A child that was killed while writing leaves an incomplete line.
    if data.endswith(b"\n"):
        return data.rstrip(b"\n")
    crashed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in _CRASHES
    return _gave_up(f"The grading process died (status {status}).", costly=crashed)


def _gave_up(why: str, *, costly: bool = False) -> bytes:
    """Return a reply with the reason why there is no answer; `costly` is True if the question itself is the reason."""
    return json.dumps({"gave_up": why, "costly": costly}).encode()


def _answer_and_exit(answer: Answer, question: Json, writing: int, memory: int) -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    # macOS has no such limit; on macOS, only the wall-clock time limits a child.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    sys.addaudithook(_refuse)
    try:
        reply = json.dumps({"answer": answer(question)}).encode()
    except MemoryError:
        reply = _gave_up("Grading needs more memory than one answer may use.", costly=True)
    except RecursionError:
        reply = _gave_up("The answer is nested too deeply for the library.", costly=True)
    # The boundary to third-party code, which may raise any exception on hostile input.
    except Exception as problem:  # noqa: BLE001
        reply = _gave_up(f"The grading library failed ({type(problem).__name__}).", costly=True)
    os.write(writing, reply + b"\n")
    os._exit(0)


def _refuse(event: str, _arguments: tuple[object, ...]) -> None:
    if event in _FORBIDDEN_EVENTS:
        raise PermissionError(f"{event} is not allowed while grading")
