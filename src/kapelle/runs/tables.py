"""Tables of JSON lines in a run directory: how a row is written, where a step ends, how a table is cut."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from kapelle.errors import NumericsError, RunDirectoryError
from kapelle.types import Json

TABLES = ("metrics.jsonl", "evaluations.jsonl", "recorded.jsonl")
"""Those whose rows a checkpoint counts; the last one is that of `recorded`."""


def row_line(table: str, step: int, row: Mapping[str, Json]) -> bytes:
    """Return a row as it is appended; NumericsError where a number in it is not finite."""
    try:
        return json.dumps({"step": step, **row}, allow_nan=False).encode("ascii") + b"\n"
    except ValueError as error:
        raise NumericsError(f"A row of {table} for step {step} holds a number that is not finite.") from error


def pretty(value: Mapping[str, Json]) -> bytes:
    """Return a whole file of JSON, indented."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def plain_lines(value: Mapping[str, str | int]) -> bytes:
    """Return the same as `pretty` for plain values, without the reference cycles that `json` makes when indenting."""
    rows = [f" {json.dumps(key)}: {json.dumps(entry, allow_nan=False)}" for key, entry in value.items()]
    return ("{\n" + ",\n".join(rows) + "\n}\n").encode()


def end_of_step(table: Path, position: int, step: int) -> int:
    """Return the end of the complete rows that follow a position and belong to a step up to this one."""
    for line in table.read_bytes()[position:].splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        position += len(line)
    return position


def refuse_short(path: Path, size: int) -> None:
    """Raise RunDirectoryError where the first `size` bytes of a table are not there or do not end a row."""
    with path.open("rb") as file:
        file.seek(max(0, size - 1))
        if size and file.read(1) != b"\n":
            raise RunDirectoryError(
                f"{path} has lost rows that its checkpoint counts ({size} bytes). Restore the file, "
                "or start again in another --run-dir."
            )


def cut_table(path: Path, size: int) -> None:
    """Leave the first `size` bytes of a table."""
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())
