"""Makes an index: reads the steps that it lacks, newest first, and writes them in short transactions.

`python -m kapelle.viewer.building FILE RUN AGENTS` does it in a process of its own, which yields the processor to others and
ends when its standard input does. Only one at a time builds an index: who does holds the lock beside its file, which ends with
its process. What it has written stays when it is killed, and the next one goes on from there.
"""

from __future__ import annotations

import gc
import json
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from kapelle.viewer.index_tables import Survey, Tables
from kapelle.viewer.lines import Place, Stamp, lines_of
from kapelle.viewer.skimming import Skimmed, skimmed

BATCH = 0.5
"""Seconds of reading between two commits."""
NICE = 5
"""How much further back than pages it stands in the queue for the processor."""
TAKEN = 3
"""Exit code where somebody else builds the index."""
FAILED = 4
"""Exit code where it cannot be written; the reason is on standard output."""
DAMAGED = 5
"""Exit code where its file is no index any more."""


def build(survey: Survey, tables: Tables, wanted: Callable[[], bool], pause: Callable[[], None]) -> None:
    """Index everything that is missing while it is wanted; `pause` is called before each step.

    Raises `sqlite3.Error` or `OSError` where the index cannot be written.
    """
    while wanted():
        survey.look()
        if gone := list(survey.gone):
            tables.forget(gone)
            survey.forget(gone)
        if found := _read(survey, wanted, pause):
            tables.put(found)
            survey.learn({place: stamp for place, (stamp, _) in found.items()})
        elif wanted():
            tables.sort()
            if not survey.lacking:
                return


def _read(
    survey: Survey, wanted: Callable[[], bool], pause: Callable[[], None]
) -> dict[Place, tuple[Stamp, list[Skimmed]]]:
    """Take steps that are missing, for as long as a batch lasts, and read them."""
    found: dict[Place, tuple[Stamp, list[Skimmed]]] = {}
    end = time.monotonic() + BATCH
    while time.monotonic() < end and wanted():
        pause()
        taken = survey.take()
        if taken is None:
            break
        place, stamp = taken
        raws = enumerate(lines_of(survey.run, *place))
        found[place] = stamp, [each for line, raw in raws if (each := skimmed(raw, line)) is not None]
    return found


@contextmanager
def only_builder(file: Path | None, seconds: float = 0.0) -> Iterator[bool]:
    """Hold the right to build an index; yields False where another one has it for that long. None is an index of nobody else's."""
    if file is None:
        yield True
        return
    lock = FileLock(f"{file}.lock")
    try:
        lock.acquire(timeout=seconds)
    except (Timeout, OSError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def main(file: str, run: str, agents: Sequence[str]) -> int:
    """Build one index in this process; return its exit code."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    with suppress(OSError):
        os.nice(NICE)
    gc.disable()  # rows are no cycles
    try:
        with only_builder(Path(file)) as alone:
            if not alone:
                return TAKEN
            tables = Tables(file, agents)
            build(Survey(Path(run), tables.known()), tables, lambda: True, lambda: None)
            tables.close()
    except (OSError, sqlite3.Error) as error:
        sys.stdout.write(str(error))
        return DAMAGED if is_damage(error) else FAILED
    return 0


def is_damage(error: Exception) -> bool:
    """Return whether an error says that the file is none of ours; others may pass, as when the disk is full."""
    passing = ("locked", "full", "readonly", "I/O", "unable to open", "interrupted")
    return isinstance(error, sqlite3.DatabaseError) and not any(word in str(error) for word in passing)


def _end_with_input() -> None:
    """End at once when the viewer does; what is not committed never was."""
    with suppress(OSError):
        while os.read(0, 1024):
            pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
