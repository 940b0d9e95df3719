"""A run's episodes as text, and changes of recorded episodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kapelle.runs.step_rows import append_step, lines_of, stored_steps


def lines_in(run: Path) -> dict[str, bytes]:
    """Return the lines of every step, `train/12` → its lines."""
    return {
        f"{folder.name}/{step}": b"".join(lines)
        for folder in sorted((run / "episodes").iterdir())
        for step, lines in step_lines(folder).items()
    }


def step_lines(folder: Path) -> dict[int, list[bytes]]:
    """Return the lines of every step of a folder, with their newlines."""
    return {
        step: [line + b"\n" for line in lines_of(stored)] for step, stored in stored_steps(folder).items()
    }


def write_steps(folder: Path, steps: dict[int, list[bytes]]) -> None:
    """Replace all files of a folder by files with these steps."""
    for path in folder.glob("*.zst"):
        path.unlink()
    for step, lines in steps.items():
        append_step(folder, step, b"".join(lines))


def change_rows(folder: Path, change: Callable[[int, dict[str, Any]], None]) -> None:
    """Write all rows of a folder again after a change, which gets the number of the line in its step."""
    steps: dict[int, list[bytes]] = {}
    for step, lines in step_lines(folder).items():
        steps[step] = []
        for number, line in enumerate(lines):
            row = json.loads(line)
            change(number, row)
            steps[step].append(json.dumps(row).encode() + b"\n")
    write_steps(folder, steps)
