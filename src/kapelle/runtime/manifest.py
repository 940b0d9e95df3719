"""Lists of files with their sizes and hashes, as stored with checkpoints and weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = re.compile(r"(\d{8,})(?:-(\d+))?")
"""The name of a checkpoint's folder: its step, and a number where there are several of a step."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint's name, None for another name."""
    match = FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal digits; lets OSError through."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON as a dictionary; ValueError when a key stands twice."""
    # A name that has turned into another's would else take its place, and one file would no longer be looked at.
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def check_listed(files: dict[str, Any]) -> None:
    """Raise ValueError or TypeError unless every file is listed by its size and SHA-256."""
    for expected in files.values():
        if expected.keys() != {"bytes", "sha256"} or type(expected["bytes"]) is not int:
            raise ValueError("another form of a file's entry")
        if not _SHA256.fullmatch(expected["sha256"]):
            raise ValueError("no SHA-256")
