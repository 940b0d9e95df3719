"""Signals outside of training, where `catch_interrupts` does not listen: they end a command at once, and surely."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from kapelle.runtime.interrupts import Arrivals, begin_wish, commands, forget_wishes, handled_by, left_behind

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM has arrived."""


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code that says which signal ended a command."""
    return EXIT_TERMINATED if isinstance(stop, Terminated) else EXIT_INTERRUPTED


def leave(code: int) -> None:
    """End the process where it was stopped or has given something up: nothing is waited for that may not end.

    What Python does beyond this at its end is to wait for threads and to free, one by one, what the process holds.
    """
    if code in (EXIT_INTERRUPTED, EXIT_TERMINATED) or left_behind:
        atexit._run_exitfuncs()  # noqa: SLF001 - what was registered is still done
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


@contextmanager
def termination() -> Iterator[None]:
    """Raise Terminated for a SIGTERM, KeyboardInterrupt for a Ctrl-C inside the block, so that what is open is closed.

    Code that takes it for an error of its own and goes on is ended by the same again, a second later, and a process that
    does not come to its end by itself within `interrupts.LAST_RESORT` seconds is ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kinds: dict[int, Callable[[], BaseException]] = {
        signal.SIGTERM: Terminated,
        signal.SIGINT: KeyboardInterrupt,
    }

    def receive(number: int, _frame: FrameType | None) -> None:
        Arrivals.heard = True
        begin_wish(number, kinds[number])
        error = kinds[number]()
        raise error

    with handled_by(receive):
        commands.append(receive)
        try:
            yield
        finally:
            with suppress(ValueError):  # a forked child has forgotten it
                commands.remove(receive)
            forget_wishes()
