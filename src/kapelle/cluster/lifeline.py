"""A process that ends when the one that started it does: its standard input is a pipe that closes then."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

EXIT_ALONE = 3


def hold_on(last: Callable[[], None] = lambda: None) -> None:
    """End this process once its standard input is closed, after `last`."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        try:
            last()
        finally:
            os._exit(EXIT_ALONE)

    threading.Thread(target=watch, name="kapelle-lifeline", daemon=True).start()


def end_session(session: int) -> None:
    """Kill the processes of a session, except this one."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(entry.name)) == session and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
