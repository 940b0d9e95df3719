"""Run a program that must end with the process that started it, even if that process is killed.

It runs as its own file, `python guard.py COMMAND…`, so that it imports nothing of kapelle. Its standard input is a pipe that the
other process holds open. When the pipe closes, or the other process is no longer its parent, it ends the program and everything in
the program's session. It ends when the program ends, with the same exit code.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

LOOK = 0.5
"""Seconds between two checks whether the program has ended."""
GRACE = 10.0
"""Seconds for the program to end after SIGTERM."""


def guarded(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a program under a guard; it ends with this process, or when `end` is called."""
    return subprocess.Popen(  # noqa: S603 - our own interpreter and file, and the caller's command
        [sys.executable, __file__, *command],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


def end(guard: subprocess.Popen[bytes]) -> None:
    """End the program of `guarded`; a second call has no effect."""
    if guard.stdin is not None:
        guard.stdin.close()
    try:
        guard.wait(timeout=3 * GRACE)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def main(command: Sequence[str], parent: int) -> int:
    """Run a program until it ends or the other process closes the pipe; return its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the other process handles signals of the terminal
        signal.signal(number, lambda *_: None)
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603 - as above
    while program.poll() is None:
        ready, _, _ = select.select([0], [], [], LOOK)
        if (ready and not os.read(0, 1)) or os.getppid() != parent:
            _signal(program, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(GRACE)
            break
    _signal(program, signal.SIGKILL)  # end the rest of its session
    code = program.wait()
    return 128 - code if code < 0 else code


def _signal(program: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.getppid()))
