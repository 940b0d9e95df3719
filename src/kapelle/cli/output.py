"""Output for people and programs: to standard output or, with `--json`, to standard error."""

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
    """Print to standard error why a command ends, one line per fault, without secrets in addresses.

    If several ranks end, one of them prints.
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
    """Print that a signal has ended a command before there was anything to save."""
    from kapelle.runtime.process_tree import own_place

    if own_place.launcher is None:
        complain("stopped.")
    elif is_first():  # the launcher has stopped all ranks, so no rank has to notify the others
        print("kapelle: stopped.", file=sys.stderr)


@contextmanager
def writing(path: Path, other: str) -> Iterator[None]:
    """Convert disk errors inside the block to an OutputError that suggests another `other`, such as a folder."""
    try:
        yield
    except FileExistsError as error:
        raise OutputError(f"{path} exists already. Choose another {other}.") from error
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}. Choose another {other}.") from error


@contextmanager
def new_file(out: Path, option: str) -> Iterator[IO[bytes]]:
    """Yield a file to write to. It becomes `out` when the block ends, and is removed if the block fails.

    Creates a missing folder of `out`, and removes it with the file. Raises OutputError, which names the `option`, before the
    block begins if `out` exists or cannot be written.
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
    """Return rows as lines with aligned columns; control characters are escaped."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def command(*words: str) -> str:
    """Return a command line of kapelle that a shell parses as these arguments."""
    return shlex.join(["kapelle", *words])


def is_first() -> bool:
    """Return whether this process is the one that prints: the only one, or rank 0 of several."""
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
    """Leave the group of ranks once all are done, or with the reason of a failure."""
    held = sys.modules.get("kapelle.runtime.rank_group")
    if held is not None:
        held.leave_ranks(failure)
