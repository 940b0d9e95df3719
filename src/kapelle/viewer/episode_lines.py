"""The lines of a run's episodes and traces, as bytes: which steps have some, and those of one step."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kapelle.errors import KapelleError
from kapelle.runs import recorded, step_rows
from kapelle.runs.step_rows import PACKED, stored_step, stored_steps

Place = tuple[str, int]
"""A split, `train` or `test`, and a step."""
Stamp = tuple[int, int]
"""Two numbers that change when a step's episodes do."""
SPLITS = ("train", "test")
MOST = 1 << 30
"""Bytes of memory for the lines of a step, more of which are left out: few compressed bytes may stand for very many."""

_GROUP = re.compile(rb'\{"step":\d{1,12},"group":(\d{1,12}),')
"""How the writer begins a line: what tells a group's lines from others without parsing them."""


def stamps(run: Path) -> Mapping[Place, Stamp]:
    """Return the steps whose episodes are recorded."""
    return {
        (split, step): stamp
        for split in SPLITS
        for step, stamp in step_rows.stamps(run / "episodes" / split).items()
    }


def damaged_files(run: Path) -> list[str]:
    """Return the names of compressed files of episodes that have lost rows to damage."""
    return [f"{split}/{name}" for split in SPLITS for name in step_rows.damaged(run / "episodes" / split)]


def losses(run: Path) -> list[str]:
    """Return, in words, which recorded steps are missing or no longer what they were."""
    return recorded.all_losses(run)


def changes(run: Path) -> object:
    """Return what differs once steps have come or gone, without a look at each."""
    found: list[object] = []
    for split in SPLITS:
        folder = run / "episodes" / split
        with suppress(OSError), os.scandir(folder) as entries:
            found.append(folder.stat().st_mtime_ns)
            found += sorted(
                (entry.name, entry.stat().st_size) for entry in entries if entry.name.endswith(PACKED)
            )
    return found


def lines_of(run: Path, split: str, step: int) -> list[bytes]:
    """Return the complete lines of a step's episodes, none where nothing can be read."""
    return _lines(run / "episodes" / (split if split in SPLITS else "train"), step)


def trace_lines(run: Path, step: int) -> list[bytes]:
    """Return the complete lines of a step's traces, none where nothing can be read."""
    return _lines(run / "traces", step)


def newest_traces(run: Path, count: int) -> list[int]:
    """Return the newest steps that have traces, in ascending order."""
    return list(stored_steps(run / "traces"))[-count:]


def _lines(folder: Path, step: int) -> list[bytes]:
    found: list[bytes] = []
    with suppress(KapelleError, OSError):  # damage ends what can be read; a step of 400 digits names no file
        stored = stored_step(folder, step)
        left = MOST
        for line in step_rows.lines_of(stored) if stored else ():
            left -= sys.getsizeof(line)
            if left < 0:
                break
            found.append(line)
    return found


def group_of(raw: bytes) -> int | None:
    """Return the number of a line's group without reading the line; None where the line begins otherwise."""
    found = _GROUP.match(raw, 0, 80)
    return None if found is None else int(found[1])
