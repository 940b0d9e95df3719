"""JSON lines as they grow: only what was appended is read, and nothing that a file holds breaks a reader."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kapelle.runtime.files import check_plain

LONGEST = 64 << 20
"""Bytes of the longest line that is read; a longer one counts as damaged."""
_KNOWN = 64
"""Bytes before the position that are compared, to notice a file that was cut and has grown again."""


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the mapping that a line holds; None for a line that holds none, whatever else it holds."""
    if len(line) > LONGEST:
        return None
    try:
        row = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def number(value: object) -> float | None:
    """Return a finite number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def readable(file: Path) -> bool:
    """Return whether this is a file that this user may read."""
    try:
        check_plain(file, file.stat().st_mode)
        with file.open("rb"):
            return True
    except OSError:
        return False


@dataclass(slots=True)
class Tail:
    """The complete lines of one file, read once each."""

    path: Path
    position: int = 0
    damaged: int = 0
    """Complete lines so far that hold no mapping."""
    _before: bytes = field(default=b"", repr=False)

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the rows that were appended since the last call, and whether the file began anew before them.

        What follows the last newline is being written, and stays for the next call. A file that is not there has no rows.
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
            return self._appended(size)
        except OSError:
            return [], False

    def _appended(self, size: int) -> tuple[list[dict[str, Any]], bool]:
        with self.path.open("rb") as file:
            start = max(0, self.position - len(self._before))
            file.seek(start)
            anew = size < self.position or file.read(self.position - start) != self._before
            if anew:
                self.position, self.damaged, self._before = 0, 0, b""
            file.seek(self.position)
            new = file.read(size - self.position)
        end = new.rfind(b"\n") + 1
        if not end:
            return [], anew
        lines = [line for line in new[:end].split(b"\n") if line.strip()]
        rows = [row for line in lines if (row := parsed(line)) is not None]
        self.damaged += len(lines) - len(rows)
        self.position += end
        self._before = (self._before + new[:end])[-_KNOWN:]
        return rows, anew
