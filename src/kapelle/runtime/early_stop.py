"""End the command immediately on a signal, with one line instead of a traceback, even while the command is still being imported."""

from __future__ import annotations

import os
import signal
import sys


def is_command() -> bool:
    """Return whether this process runs the command `kapelle` or `python -m kapelle`.

    In the second form, the name of the program is `-m` while the package is imported.
    """
    called = sys.argv[0] if sys.argv else ""
    name = called.replace("\\", "/").rpartition("/")[2]
    return name in ("kapelle", "kapelle.exe") or (called == "-m" and "kapelle" in sys.orig_argv)


SHOW_CURSOR = b"\x1b[?25h\n"
"""Escape sequence that shows the cursor of the terminal, which the progress panel has hidden."""


def end_at_once(number: int, _frame: object = None) -> None:
    """End the process immediately on a signal, and print one line."""
    if os.environ.get("RANK", "0") == "0":  # only the first rank prints
        os.write(2, SHOW_CURSOR * os.isatty(2) + b"kapelle: stopped.\n")
    os._exit(128 + number)


def take_ctrl_c() -> None:
    """Let Ctrl-C end this process immediately until `cli.main` handles it, unless SIGINT already has another handler."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
