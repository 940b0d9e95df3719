"""Output for people and programs: to standard output or, with `--json`, to standard error."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kapelle.errors import ConfigError, OutputError
from kapelle.runtime.characters import cleaned
from kapelle.runtime.interrupts import gone_terminal

if TYPE_CHECKING:
    from kapelle.runtime.ranks import LaunchedRank


def complain(reason: str) -> None:
    """Print on standard error, as one line, why a command ends; without secrets of the addresses in it.

    Of several ranks that end, one prints.
    """
    from kapelle.runtime.credentials import without_secrets

    line = printable(f"kapelle: {' '.join(without_secrets(reason).split())}")
    if _seat() is None:
        print(line, file=sys.stderr)
        return
    from kapelle.runtime.rank_group import say_for_all

    say_for_all(line)


def complain_of_stop() -> None:
    """Print that a signal has ended a command before there was anything to save."""
    from kapelle.runtime.process_tree import own_place

    if own_place.launcher is None:
        complain("stopped.")
    elif is_first():  # the launcher has stopped all of them: nobody has to be told
        print("kapelle: stopped.", file=sys.stderr)


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print a text at once, without control characters; OutputError when it cannot be written (a full disk).

    A closed pipe raises BrokenPipeError: the reader has seen enough, which is not an error.
    """
    try:
        print(cleaned(text), file=stream or sys.stdout, flush=True)
    except BrokenPipeError:
        raise
    except RuntimeError:
        # A signal's message came in the middle of another line; it is the one that can be dropped.
        return
    except OSError as error:
        if error.errno == errno.EIO and gone_terminal((stream or sys.stdout).fileno()):
            return  # nobody looks any more; whether that ends the command is for SIGHUP to say
        raise OutputError(f"The output cannot be written: {error.strerror}. Send it elsewhere.") from error


@contextmanager
def writing(path: Path, other: str) -> Iterator[None]:
    """Turn what the disk refuses inside the block into an OutputError; `other` is what to name differently."""
    try:
        yield
    except FileExistsError as error:
        raise OutputError(f"{path} exists already. Name another {other}.") from error
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}. Name another {other}.") from error


def program() -> str:
    """Return how this program was called, so that the commands which it prints can be copied."""
    called = Path(sys.argv[0])
    if called.name != "kapelle" or shutil.which("kapelle"):
        return "kapelle"
    near = os.path.relpath(called)
    return shlex.quote(near if len(near) < len(str(called)) else str(called))


def command(*words: str) -> str:
    """Return a command line of this program that a shell reads as these words."""
    return " ".join([program(), *map(shlex.quote, words)])


def is_first() -> bool:
    """Return whether this process is the one that prints: alone, or rank 0 of several."""
    seat = _seat()
    return seat is None or seat.rank == 0


def _seat() -> LaunchedRank | None:
    if "RANK" not in os.environ:
        return None
    from kapelle.runtime.ranks import launched_rank

    try:
        return launched_rank()
    except ConfigError:
        return None


def complain_of_defect(error: Exception) -> int | None:
    """Print an unexpected error once for all ranks and return the exit code; None for a process alone, which raises it."""
    if _seat() is None:
        return None
    from kapelle.runtime.rank_group import say_defect

    return say_defect(error)


def leave_ranks_here(failure: str | None = None) -> None:
    """Leave the other ranks of a run, once all are done, or with the reason of a failure."""
    held = sys.modules.get("kapelle.runtime.rank_group")
    if held is not None:
        held.leave_ranks(failure)


def printable(text: str, width: int | None = None) -> str:
    """Return a text on one line without control characters, which models may write."""
    shown = cleaned(text).replace("\n", "⏎").replace("\t", " ")
    if width is not None and len(shown) > width:
        return f"{shown[: max(0, width - 1)]}…"
    return shown


def score(success: float | None, interval: tuple[float, float] | None) -> str:
    """Return a score with its interval: `54.2 % [49.8, 58.5]`."""
    from kapelle.metrics.statistics import share_text

    return share_text(success, interval)


def returns(earned: Mapping[str, float]) -> str:
    """Return what each seat earned: `first 0.125, second -0.125`."""
    return ", ".join(f"{agent} {value:.3f}" for agent, value in earned.items())
