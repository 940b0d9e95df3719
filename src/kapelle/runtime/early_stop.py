"""End the command at once on a signal, with one line instead of a traceback, and on Ctrl-C while the command is imported."""

from __future__ import annotations

import os
import signal
import sys


def is_command() -> bool:
    """Return whether this process is `kapelle`, or `python -m kapelle`, which has the name `-m` while its package is imported."""
    called = sys.argv[0] if sys.argv else ""
    name = called.replace("\\", "/").rpartition("/")[2]
    return name in ("kapelle", "kapelle.exe") or (called == "-m" and "kapelle" in sys.orig_argv)


SHOW_CURSOR = b"\x1b[?25h\n"
"""Escape sequence that shows the terminal's cursor, which the progress panel has hidden."""


def end_at_once(number: int, _frame: object = None) -> None:
    """End the process on a signal, in one line."""
    if os.environ.get("RANK", "0") == "0":  # only the first rank prints
        os.write(2, SHOW_CURSOR * os.isatty(2) + b"kapelle: stopped.\n")
    os._exit(128 + number)


def take_ctrl_c() -> None:
    """Let a Ctrl-C end this process at once until `cli.main` handles it, unless SIGINT has another handler."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
