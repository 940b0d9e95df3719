"""Print texts that may come from models: without control characters, and with an error that tells what to do."""

from __future__ import annotations

import errno
import sys
from typing import TextIO

from kapelle.errors import OutputError
from kapelle.runtime.characters import cleaned
from kapelle.runtime.interrupts import gone_terminal


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print a text at once, without control characters; OutputError when it cannot be written (a full disk).

    A closed pipe raises BrokenPipeError: the reader has seen enough, which is not an error.
    """
    try:
        print(cleaned(text), file=stream or sys.stdout, flush=True)
    except BrokenPipeError:
        raise
    except RuntimeError:
        # A signal's message came while another line was being printed; the message can be dropped.
        return
    except OSError as error:
        if error.errno == errno.EIO and gone_terminal((stream or sys.stdout).fileno()):
            return  # the terminal is closed; SIGHUP decides whether that ends the command
        raise OutputError(f"The output cannot be written: {error.strerror}. Send it elsewhere.") from error


def printable(text: str, width: int | None = None) -> str:
    """Return a text on one line without control characters, which models may write."""
    shown = cleaned(text).replace("\n", "⏎").replace("\t", " ")
    if width is not None and len(shown) > width:
        return f"{shown[: max(0, width - 1)]}…"
    return shown
