"""The inside of a process that can be killed: a loop that forks a child for every question."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from kapelle.runtime.clock import SuspendAwareClock, wait_readable
from kapelle.types import Json

Answer = Callable[[Json], Json]

_SPARE_BYTES = 1 << 16
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""How a process ends that a text has nested too deep for its stack: what was asked is the reason, not the machine."""
# Work on text needs none of these; a library that is talked into one of them fails instead.
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
    """Answer the questions on standard input, one JSON line each, until it ends.

    The program's first argument is the address space of a child in bytes. Every question runs in a forked
    child that ends after the question's `cpu_s` seconds of CPU, or `wall_s` on the clock.
    """
    memory = int(sys.argv[1])
    # What a library prints must not get between the answers.
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
        # Only the server speaks to who asked.
        os.close(reading)
        os.close(replies)
        # The signal ends the process, whatever it is busy with: no handler of Python's has to run.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        _answer_and_exit(answer, asked["question"], writing, memory)
    os.close(writing)
    try:
        data, late = _drain(reading, wall_s)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if late:
        # The clock says how busy the machine is, and nothing of what was asked.
        return _gave_up(f"It takes longer than {wall_s:g} s.")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return _gave_up(f"It takes longer than {cpu_s:g} s of CPU.", costly=True)
    # A child that died while it wrote has written half a line.
    if data.endswith(b"\n"):
        return data.rstrip(b"\n")
    crashed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in _CRASHES
    return _gave_up(f"Its process died (status {status}).", costly=crashed)


def _drain(reading: int, wall_s: float) -> tuple[bytes, bool]:
    data, clock = b"", SuspendAwareClock()
    while not data.endswith(b"\n"):
        if not wait_readable(reading, clock, wall_s):
            return data, True
        part = os.read(reading, _SPARE_BYTES)
        if not part:
            break
        data += part
    return data, False


def _gave_up(why: str, *, costly: bool = False) -> bytes:
    """Return the reply that says why there is no answer, and whether what was asked is itself the reason."""
    return json.dumps({"gave_up": why, "costly": costly}).encode()


def _answer_and_exit(answer: Answer, question: Json, writing: int, memory: int) -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    _bound_memory(memory)
    sys.addaudithook(_refuse)
    try:
        reply = json.dumps({"answer": answer(question)}).encode()
    except MemoryError:
        reply = _gave_up("It takes more memory than one answer may.", costly=True)
    except RecursionError:
        reply = _gave_up("It nests deeper than the library can follow.", costly=True)
    # The boundary of third-party work: whatever a library raises on a hostile text ends here.
    except Exception as problem:  # noqa: BLE001
        reply = _gave_up(f"The library failed ({type(problem).__name__}).", costly=True)
    os.write(writing, reply + b"\n")
    os._exit(0)


def _bound_memory(memory: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    except (ValueError, OSError):
        # macOS has no such limit; the wall time bounds what a child can take there.
        return


def _refuse(event: str, _arguments: tuple[object, ...]) -> None:
    if event in _FORBIDDEN_EVENTS:
        raise PermissionError(f"{event} is not a part of grading")
