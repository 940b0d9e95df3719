"""Signals outside of training, where `catch_interrupts` does not listen: they end a command at once, and surely."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kapelle.runtime.interrupts import begin_wish, forget_wishes

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM has arrived."""


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code that says which signal ended a command."""
    return EXIT_TERMINATED if isinstance(stop, Terminated) else EXIT_INTERRUPTED


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
        begin_wish(number, kinds[number])
        error = kinds[number]()
        raise error

    before = {number: signal.signal(number, receive) for number in kinds}
    try:
        yield
    finally:
        forget_wishes()
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
