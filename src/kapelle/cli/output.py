"""Prints output for users and programs. The output for users goes to standard output or, with `--json`, to standard error."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from kapelle.errors import EACH, ConfigError, OutputError
from kapelle.runtime.console import printable


def complain(reason: str) -> None:
    """Print the reason why a command fails to standard error, with one line per error and without secrets in addresses.

    If several ranks fail, only one of them prints the reason.
    """
    from kapelle.runtime.credentials import without_secrets

    parts = without_secrets(f"kapelle: {reason}").split(EACH)
    lines = [printable(" ".join(part.split())) for part in parts]
    if not is_rank():
        print(EACH.join(lines), file=sys.stderr)
        return
    from kapelle.runtime.rank_group import report_to_all

    report_to_all(" ".join(lines))


def complain_of_stop() -> None:
    """Print that a signal has stopped a command before there was anything to save."""
    from kapelle.runtime.process_tree import own_place

    if own_place.launcher is None:
        complain("stopped.")
    elif is_first():  # the launcher has stopped all ranks, so no rank has to notify the others
        print("kapelle: stopped.", file=sys.stderr)


@contextmanager
def writing(path: Path, other: str) -> Iterator[None]:
    """Convert operating system errors inside the block to an OutputError that suggests another `other`, such as a folder."""
    try:
        yield
    except FileExistsError as error:
        raise OutputError(f"{path} exists already. Choose another {other}.") from error
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}. Choose another {other}.") from error


@contextmanager
def new_file(out: Path, option: str) -> Iterator[IO[bytes]]:
    """Yield a file for writing, which becomes `out` when the block ends. If the block fails, the file is removed.

    If the folder of `out` is missing, it is created, and removed again together with the file. Raises OutputError,
    which mentions `option`, before the block begins if `out` exists or cannot be written.
    """
    beside = out.with_name(f".{out.name}.{os.getpid()}.partial")
    if out.exists():
        raise OutputError(f"{out} exists already. Choose another {option}, or remove it first.")
    made = not out.parent.exists() and out.parent.parent.is_dir()
    with writing(out, option):
        if made:
            out.parent.mkdir()
        file = beside.open("wb", buffering=0)  # so that closing never writes
    try:
        with file:
            yield file
            with writing(out, option):
                os.fsync(file.fileno())
                beside.rename(out)
    finally:
        with suppress(OSError):
            beside.unlink()
        with suppress(OSError):
            if made:
                out.parent.rmdir()  # fails for a folder that is not empty


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns. Control characters are escaped."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def command(*words: str) -> str:
    """Return a kapelle command as a string that a shell splits into the given arguments."""
    return shlex.join(["kapelle", *words])


def is_first() -> bool:
    """Return whether this process prints output, which is true for a single process and for rank 0 of several processes."""
    return not is_rank() or int(os.environ["RANK"]) == 0


def is_rank() -> bool:
    """Return whether a launcher has started this process as one of several ranks."""
    if "RANK" not in os.environ:
        return False
    from kapelle.runtime.ranks import launched_rank

    try:
        return launched_rank() is not None
    except ConfigError:
        return False


def leave_ranks_here(failure: str | None = None) -> None:
    """Leave the group of ranks, either when all ranks are finished or with the reason for a failure."""
    held = sys.modules.get("kapelle.runtime.rank_group")
    if held is not None:
        held.leave_ranks(failure)
