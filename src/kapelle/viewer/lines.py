"""Reads JSON lines of growing files. Only lines that were appended are read, and damaged content does not raise an error."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from kapelle.errors import KapelleError
from kapelle.runs import step_rows
from kapelle.runs.step_rows import Stored, stored_step
from kapelle.runtime.files import check_plain

LONGEST = 64 << 20
"""The maximum number of bytes of a line. A longer line counts as damaged."""
_KNOWN = 64
"""The number of bytes before the read position that are compared, to detect a file that was truncated and has grown again."""


def parsed(line: bytes) -> dict[str, Any] | None:
    """Parse a line as a mapping. Returns None for any other line."""
    if len(line) > LONGEST:
        return None
    try:
        row = from_json(line)  # several times faster
    except ValueError:  # also raised for invalid UTF-8, and for lone surrogates
        try:
            row = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None


def number(value: object) -> float | None:
    """Return a finite number as a float, or None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def text(value: object) -> str:
    """Return a value as a string, or an empty string for None."""
    return "" if value is None else value if isinstance(value, str) else str(value)


def listing(value: object) -> Sequence[Any]:
    """Return a list unchanged, or an empty list for any other value."""
    return value if isinstance(value, list) else []


def mapping(value: object) -> Mapping[str, Any]:
    """Return a mapping unchanged, or an empty mapping for any other value."""
    return value if isinstance(value, Mapping) else {}


def whole(value: object) -> int | None:
    """Return an integer that a double can represent exactly, or None for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if there are no such values."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def readable(file: Path) -> bool:
    """Return whether a path is a regular file that the current user may read."""
    try:
        check_plain(file, file.stat().st_mode)
        with file.open("rb"):
            return True
    except OSError:
        return False


@dataclass(slots=True)
class Tail:
    """Reads each complete line of a growing file once."""

    path: Path
    position: int = 0
    damaged: int = 0
    """The number of complete lines so far that do not contain a mapping."""
    _before: bytes = field(default=b"", repr=False)

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the rows that were appended since the last call, and whether the file was replaced or truncated in the meantime.

        Content after the last newline is still being written, so a later call reads it. A missing file has no rows.
        """
        try:
            about = self.path.stat()
            check_plain(self.path, about.st_mode)
            size = about.st_size
        except OSError:
            size = 0
        if size == self.position:
            return [], False
        try:
            with self.path.open("rb") as file:
                start = max(0, self.position - len(self._before))
                file.seek(start)
                # If a file was truncated and has grown beyond the position, the bytes before the position differ.
                restarted = size < self.position or file.read(self.position - start) != self._before
                if restarted:
                    self.position, self.damaged, self._before = 0, 0, b""
                file.seek(self.position)
                new = file.read(size - self.position)
        except OSError:
            return [], False
        end = new.rfind(b"\n") + 1
        if not end:
            return [], restarted
        lines = [line for line in new[:end].split(b"\n") if line.strip()]
        rows = [row for line in lines if (row := parsed(line)) is not None]
        self.damaged += len(lines) - len(rows)
        self.position += end
        self._before = (self._before + new[:end])[-_KNOWN:]
        return rows, restarted


# -------- The lines of a run's episodes and traces as bytes

Place = tuple[str, int]
"""A split (`train` or `test`) and a step."""
SPLITS = ("train", "test")
MOST = 1 << 30
"""The maximum number of bytes of a step's lines in memory, because a small compressed file may decompress to a huge size."""

_GROUP = re.compile(rb'\{"step":\d{1,12},"group":(\d{1,12}),')
"""A regular expression for the beginning of a line, which contains the number of the group."""


def recorded(run: Path) -> Mapping[Place, Stored]:
    """Return the recorded steps, each with the location of its episodes."""
    return {
        (split, step): stored
        for split in SPLITS
        for step, stored in step_rows.stored_steps(run / "episodes" / split).items()
    }


def damaged_files(run: Path) -> list[str]:
    """Return the names of the damaged episode files of a run."""
    return [f"{split}/{name}" for split in SPLITS for name in step_rows.damaged(run / "episodes" / split)]


def lines_of(run: Path, split: str, step: int) -> list[bytes]:
    """Return the lines of a step's episodes, up to the first damaged line."""
    return _lines(run / "episodes" / (split if split in SPLITS else "train"), step)


def trace_lines(run: Path, step: int) -> list[bytes]:
    """Return the lines of a step's traces, up to the first damaged line."""
    return _lines(run / "traces", step)


def _lines(folder: Path, step: int) -> list[bytes]:
    # OSError: a step with 400 digits is too long for a file name.
    with suppress(KapelleError, OSError):
        return stored_lines(stored_step(folder, step))
    return []


def stored_lines(stored: Stored | None) -> list[bytes]:
    """Return the lines of a recorded step, up to the first damaged line."""
    found: list[bytes] = []
    with suppress(KapelleError, OSError):
        left = MOST
        for line in step_rows.lines_of(stored) if stored else ():
            left -= sys.getsizeof(line)
            if left < 0:
                break
            found.append(line)
    return found


def group_of(raw: bytes) -> int | None:
    """Return the group number of a line without parsing the line, or None if the line does not begin as expected."""
    found = _GROUP.match(raw, 0, 80)
    return None if found is None else int(found[1])
