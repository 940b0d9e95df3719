"""What a loss of power may leave of a recorded run, by the model of the fault harness."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.faults.crashes import _FLUSHED, _Folder, _leave, _replayed
from tests.faults.shim import Calls, Operation


def disk(*operations: tuple[Calls, str, str]) -> _Folder:
    return _replayed(None, [_operation(*each) for each in operations])


def _operation(kind: Calls, path: str, rest: str = "") -> Operation:
    renamed = kind is Calls.RENAME
    return Operation(kind, path, rest if renamed else "", 0, b"" if renamed else rest.encode())


def left(folder: _Folder, place: Path) -> dict[str, bytes]:
    _leave(folder, place, _FLUSHED, random.Random(0))
    return {p.relative_to(place).as_posix(): p.read_bytes() for p in place.rglob("*") if p.is_file()}


WRITTEN = ((Calls.OPEN, ".a.partial", ""), (Calls.WRITE, ".a.partial", "new"))
RENAMED = (Calls.RENAME, ".a.partial", "a")


@pytest.mark.parametrize(
    ("operations", "found"),
    [
        # Neither the name nor the content is sure.
        ((*WRITTEN, RENAMED), {}),
        # The name alone: an empty file, which is what a renaming without a flush leaves.
        ((*WRITTEN, RENAMED, (Calls.FSYNC, ".", "")), {"a": b""}),
        # The content alone: nobody finds it.
        ((*WRITTEN, (Calls.FSYNC, ".a.partial", ""), RENAMED), {}),
        ((*WRITTEN, (Calls.FSYNC, ".a.partial", ""), RENAMED, (Calls.FSYNC, ".", "")), {"a": b"new"}),
        # A file that is flushed in a folder whose own name is not.
        (((Calls.MKDIR, "b", ""), (Calls.OPEN, "b/c", ""), (Calls.FSYNC, "b", "")), {}),
    ],
)
def test_only_what_was_flushed_is_left(
    operations: tuple[tuple[Calls, str, str], ...], found: dict[str, bytes], tmp_path: Path
) -> None:
    assert left(disk(*operations), tmp_path / "left") == found
