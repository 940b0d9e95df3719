"""Threads that end before they begin, for want of memory.

`Thread.start` waits until the new thread says that it runs, and a thread that finds no memory for its first lines says
nothing: whoever started it, a library too, would wait for ever (CPython, gh-140746). A command ends in one line instead.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

PATIENCE_S = 20.0
"""Seconds after which a thread that has not begun never will, however busy the machine is."""
EXIT_WITHOUT_MEMORY = 2
_STARTED_BY = "thread started by"
"""What Python says of an error that no line of the thread's own could catch."""
_REASON = (
    b"kapelle: There is no memory left to start a thread with. End other programs, raise the limit of memory (`ulimit -v`), "
    b"or use a smaller model or batch. What the last checkpoint holds is kept; go on with --resume.\n"
)  # made beforehand: there is no memory for it later


@contextmanager
def end_without_memory() -> Iterator[None]:
    """Inside the block, end the process with its reason when a thread found no memory to begin with."""
    before = sys.unraisablehook

    def hook(raised: sys.UnraisableHookArgs) -> None:
        if issubclass(raised.exc_type, MemoryError) and _STARTED_BY in (raised.err_msg or ""):
            end()
        before(raised)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def end() -> NoReturn:
    """End the process with its reason, which takes no memory."""
    with suppress(OSError):
        os.write(2, _REASON)
    os._exit(EXIT_WITHOUT_MEMORY)


class Starts:
    """The threads of this process that were started and have not begun."""

    def __init__(self) -> None:
        self._waited: dict[threading.Thread, float] = {}

    def lost(self, passed: float) -> bool:
        """Return whether one of them has not begun for `PATIENCE_S`; `passed` are the seconds since the last question."""
        waiting = [thread for thread in threading.enumerate() if not thread.is_alive()]
        self._waited = {thread: self._waited.get(thread, 0.0) + passed for thread in waiting}
        return any(waited > PATIENCE_S for waited in self._waited.values())
