"""Run a program that must end with the process that started it, even if that process is killed.

The guard is a separate process, `python guard.py COMMAND…`, that does not import kapelle. The standard input of the guard is a pipe
that the parent process keeps open. When the pipe closes, or when the parent process is no longer the parent of the guard, the guard
ends the program and all processes in the program's session. When the program exits, the guard exits with the same exit code.
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
"""Time in seconds between two checks whether the program has exited."""
GRACE = 10.0
"""Maximum time in seconds for the program to exit after SIGTERM."""


def guarded(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a program under a guard. The program ends when this process ends or when `end` is called."""
    return subprocess.Popen(  # noqa: S603 - our own interpreter and file, and the caller's command
        [sys.executable, __file__, *command],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


def end(guard: subprocess.Popen[bytes]) -> None:
    """End the program that was started with `guarded`. Further calls have no effect."""
    if guard.stdin is not None:
        guard.stdin.close()
    try:
        guard.wait(timeout=3 * GRACE)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def main(command: Sequence[str], parent: int) -> int:
    """Run a program until it exits or until the process that started the guard closes the pipe, and return the exit code."""
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
