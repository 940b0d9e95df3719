"""Handles signals outside of training, while `catch_interrupts` is inactive. These signals terminate a command immediately and reliably."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from kapelle.runtime.early_stop import end_at_once
from kapelle.runtime.interrupts import SIGNALS, commands, ending, handled_by, hung_up, left_behind, listed
from kapelle.runtime.machine import end_without_memory

EXIT_WRONG = 2
"""The exit code of a command that fails with an error message."""


def exit_code() -> int:
    """Return the exit code for the signal that is terminating this command."""
    return 128 + (ending[0] if ending else int(signal.SIGINT))


def leave(code: int) -> None:
    """Terminate the process immediately if a signal has stopped it, or if it still has threads that may never finish.

    Without this function, Python would wait for threads at exit and free the objects of the process one by one. If
    another signal arrives in the meantime, the process terminates with the same exit code.
    """
    if code - 128 in SIGNALS or left_behind:
        with handled_by(lambda *_: os._exit(code)), listed(code, commands):
            atexit._run_exitfuncs()  # noqa: SLF001 - registered functions still run
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while Python ends is silent


def take_signals() -> None:
    """Make Ctrl-C before and after `termination` terminate this process with a one-line message, also in background jobs.

    A shell starts background jobs with SIGINT ignored. However, kapelle handles SIGINT, because such a signal is sent
    to this process on purpose.
    """

    def report_all_but_stops(raised: sys.UnraisableHookArgs) -> None:
        # A Ctrl-C in a destructor or callback cannot be caught; the watchdog ends the command.
        if not issubclass(raised.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(raised)

    sys.unraisablehook = report_all_but_stops
    if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
        signal.signal(signal.SIGINT, end_at_once)


@contextmanager
def termination() -> Iterator[None]:
    """Return a context manager that raises KeyboardInterrupt for a signal inside the block, so that files are closed.

    If the exception has not terminated the process after `interrupts.LAST_RESORT` seconds, the process is terminated
    regardless of its state. The process is also terminated if a thread cannot start for lack of memory.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def receive(number: int, _frame: FrameType | None) -> None:
        hung_up(number)
        # While torch or transformers is being imported for the first time, nothing is open yet. An exception in the middle of
        # the import surfaces as any other error, and inside torch's C++ it aborts the process with a page of trace.
        specs = (getattr(sys.modules.get(name), "__spec__", None) for name in ("torch", "transformers"))
        if any(getattr(spec, "_initializing", False) for spec in specs):
            end_at_once(number)
        ending.append(number)
        raise KeyboardInterrupt

    with handled_by(receive), end_without_memory(), listed(receive, commands):
        yield
