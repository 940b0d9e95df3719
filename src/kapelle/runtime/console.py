"""Print text that may come from models, without control characters and with a clear error if printing fails."""

from __future__ import annotations

import errno
import sys
from typing import TextIO

from kapelle.errors import OutputError
from kapelle.runtime.characters import cleaned
from kapelle.runtime.interrupts import gone_terminal


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print a string without control characters, and flush the output.

    Raises OutputError if the string cannot be written, for example because the disk is full. Raises BrokenPipeError if the pipe is
    closed; this is not an error of the command, because the reader needs no more output.
    """
    try:
        print(cleaned(text), file=stream or sys.stdout, flush=True)
    except BrokenPipeError:
        raise
    except RuntimeError:
        # A signal handler printed while another line was being printed: drop its message.
        return
    except OSError as error:
        if error.errno == errno.EIO and gone_terminal((stream or sys.stdout).fileno()):
            return  # the terminal is closed; SIGHUP may end the command
        raise OutputError(
            f"The output cannot be written: {error.strerror}. Redirect it to another place."
        ) from error


def printable(text: str, width: int | None = None) -> str:
    """Return a string as one line without control characters."""
    shown = cleaned(text).replace("\n", "⏎").replace("\t", " ")
    if width is not None and len(shown) > width:
        return f"{shown[: max(0, width - 1)]}…"
    return shown
