"""A run's episodes as text, whichever form they are kept in."""

from __future__ import annotations

from pathlib import Path

from kapelle.runs.step_rows import lines_of, packed_files, plain_file, stored_steps


def lines_in(run: Path) -> dict[str, bytes]:
    """Return the lines of every step, `train/12` → what a plain file of it holds."""
    return {
        f"{folder.name}/{step}": b"".join(line + b"\n" for line in lines_of(stored))
        for folder in sorted((run / "episodes").iterdir())
        for step, stored in stored_steps(folder).items()
    }


def lay_plain(folder: Path) -> None:
    """Put every step into a file of its own, as older versions did."""
    for step, stored in stored_steps(folder).items():
        plain_file(folder, step).write_bytes(b"".join(line + b"\n" for line in lines_of(stored)))
    for path in packed_files(folder):
        path.unlink()
