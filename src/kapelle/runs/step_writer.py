"""Writing rows by step into a folder of a run, in the compressed form, and taking steps away again; see `step_rows`.

A step is appended to the newest file with one write. A file that holds `STEPS` steps or `SIZE` bytes is complete, and the next
step begins another one, which is named after it: the same steps make the same files, however often a run was killed
and continued. No function here catches OSError.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kapelle.runs.packed_rows import pack, scan
from kapelle.runs.step_rows import PACKED, first_step, packed_files, plain_file, plain_files
from kapelle.runtime.files import replace_file, write_all

STEPS = 16
SIZE = 16 << 20


@dataclass(frozen=True, slots=True)
class Later:
    """What a file holds of the steps after one."""

    file: Path
    name: str
    """Of a file of the same form with these steps alone."""
    steps: tuple[int, ...]
    before: bytes | None = None
    """What stays in the file; None where nothing does."""
    after: bytes = b""
    """What it loses where something stays."""


def record(folder: Path, step: int, content: bytes) -> tuple[Path, bytes]:
    """Append the lines of a step, which is there once; return the file and what it got. Nothing is flushed to the disk."""
    assert not plain_file(folder, step).exists(), f"step {step} is recorded once"
    data = pack(step, content.splitlines(keepends=True))
    newest = next(reversed(packed_files(folder)), None)
    if newest is not None:
        packed, size = scan(newest), newest.stat().st_size
        assert step not in packed.steps, f"step {step} is recorded once"
        if len(packed.steps) < STEPS and packed.end == size < SIZE:
            _append(newest, data)
            return newest, data
    begun = folder / f"{step:08d}{PACKED}"
    replace_file(begun, data, sync=False)
    return begun, data


def _append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
        if about.st_nlink > 1:  # a copy by hard links shares the file
            replace_file(path, path.read_bytes() + data, sync=False)
            return
        try:
            write_all(descriptor, data)
        except OSError:
            with suppress(OSError):  # a full disk may have taken a part
                os.ftruncate(descriptor, about.st_size)
            raise
    finally:
        os.close(descriptor)


def later_parts(folder: Path, last: int) -> list[Later]:
    """Return what the files of a folder hold of the steps after `last`, half-written ones included."""
    return [*_later_plain(folder, last), *_later_packed(folder, last)]


def _later_plain(folder: Path, last: int) -> Iterator[Later]:
    for step, path in plain_files(folder):
        if step > last:
            yield Later(path, path.name, (step,))


def _later_packed(folder: Path, last: int) -> Iterator[Later]:
    files = packed_files(folder)
    begun = sum(first_step(path) <= last for path in files)
    # Steps are recorded in order, so that a file before the last one that begins in time holds none that came later.
    for path in files[max(0, begun - 1) :]:
        packed, size = scan(path), path.stat().st_size
        steps = tuple(sorted({frame.step for frame in packed.frames if frame.step > last}))
        counted = max((frame.step for frame in packed.frames if frame.step <= last), default=-1)
        # Damage behind the last counted step is what a loss of power has left of later ones; so is a file that begins there.
        late = counted == last or first_step(path) > last
        torn = size > packed.end and (packed.fault is None or late)
        if not steps and not torn:
            continue
        data = path.read_bytes()
        cut = min((frame.start for frame in packed.frames if frame.step > last), default=packed.end)
        behind = [frame for frame in packed.frames if frame.start >= cut]
        before = data[:cut] + b"".join(data[f.start : f.end] for f in behind if f.step <= last)
        after = b"".join(data[frame.start : frame.end] for frame in behind if frame.step > last)
        name = f"{steps[0]:08d}{PACKED}" if steps else path.name
        yield Later(path, name, steps, before, after) if before else Later(path, name, steps)


def cut(folder: Path, last: int) -> None:
    """Remove the steps after `last`, and what was being written; a kill in between leaves some of them."""
    for later in later_parts(folder, last):
        if later.before is None:
            later.file.unlink()
        else:
            replace_file(later.file, later.before)


def forgettable(folder: Path, before: int) -> dict[Path, int]:
    """Return the files that hold only steps before one, each with its last step."""
    found = {path: step for step, path in plain_files(folder) if step < before}
    for path in packed_files(folder):
        last = max(scan(path).steps, default=before) if first_step(path) < before else before
        if last < before:
            found[path] = last
    return found
