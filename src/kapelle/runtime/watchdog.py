"""Run checks ten times per second on a separate thread, independently of the main thread."""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from kapelle.runtime import machine
from kapelle.runtime.early_stop import SHOW_CURSOR

TICK = 0.1
"""Time in seconds between two checks."""
MOST = 1.0
"""Maximum time in seconds that is counted between two checks. If the time is longer, the process was stopped."""

_looks: list[Callable[[float], None]] = []
_starting = threading.Lock()
_runs = False


def every_tick(look: Callable[[float], None]) -> None:
    """Call `look` at every tick with the time in seconds since the last tick, without time in which this process was stopped.

    If the same function is already called at every tick, this function has no effect. Raises MemoryError if the thread cannot be
    started.
    """
    global _runs  # noqa: PLW0603 - there is one thread
    with _starting:
        if look not in _looks:
            _looks.append(look)
        if not _runs:
            # Not `Thread.start`: without memory it would wait forever, and only this thread could notice.
            begun = threading.Event()
            _thread.start_new_thread(_run, (begun,))
            if not begun.wait(machine.THREAD_START_S):
                raise MemoryError
            _runs = True


def _run(begun: threading.Event) -> None:
    begun.set()
    before = time.monotonic()
    while True:
        time.sleep(TICK)
        now = time.monotonic()
        passed, before = min(now - before, MOST), now
        for look in tuple(_looks):
            look(passed)


def end_process(message: str, code: int) -> NoReturn:
    """End this process immediately, after writing a line to standard error and to the logs of its runs."""
    line = f"kapelle: {message}\n".encode()
    with suppress(OSError, ValueError):
        os.write(2, SHOW_CURSOR * os.isatty(2) + line)
    machine.log_last(line)
    os._exit(code)


def _forget() -> None:
    global _runs, _starting
    _runs, _starting = False, threading.Lock()
    _looks.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget)
