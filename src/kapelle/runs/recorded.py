"""Records what a run has written for each step, and checks whether all of it still exists.

    recorded.jsonl     a row for each step of a folder, appended after its rows are written:
                       {"step": 12, "folder": "episodes/train", "rows": 64, "sha256": …, "frames": …}
    forgotten.json     for each folder, the step before which the run itself may have deleted episodes

The field `sha256` is the digest of the lines. The lines are stored in compressed frames. The field `frames` is the
digest of the descriptions of these frames (their positions in the step, sizes and checksums), so that a step can be
compared without decompressing it. The row is appended last. Therefore, a step that was being written by a killed
process has no row, and is not reported as missing.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kapelle.errors import DataError, RunDirectoryError
from kapelle.runs.step_rows import (
    Frame,
    Stored,
    frames_of,
    known_scan,
    packed_files,
    reading,
    scan,
    whole_steps,
)
from kapelle.runtime.files import plain_bytes
from kapelle.types import Json

RECORDED = "recorded.jsonl"
FORGOTTEN = "forgotten.json"
FOLDERS = ("episodes/train", "episodes/test", "traces")
_CONTENTS = {"episodes/train": "episodes", "episodes/test": "test episodes", "traces": "traces"}
_STEP = re.compile(rb'\{"step": (\d{1,12})[,}]')
"""A regular expression for the start of a row of metrics, which contains the step."""
MISSING = "are missing"
CUT = "have lost rows"
REPLACED = "differ from what the run recorded"
TWICE = "are recorded twice"
UNREADABLE = "are damaged"


@dataclass(frozen=True, slots=True)
class LostRows:
    """A step whose rows differ from the record."""

    folder: str
    step: int
    fault: str
    """What is wrong with the rows, as a phrase that follows a plural noun."""
    file: Path | None = None


def described(folder: str, content: bytes, data: bytes) -> dict[str, Json]:
    """Return the row of `recorded.jsonl` for the lines of a step and the frames in which they are stored, without the step."""
    return {
        "folder": folder,
        "rows": content.count(b"\n"),
        "sha256": hashlib.sha256(content).hexdigest(),
        "frames": _digest(frames_of(data)),
    }


def losses(run: Path, folder: str, counted: int | None = None, *, contents: bool = False) -> list[LostRows]:
    """Return the recorded steps of a folder that are missing, incomplete, replaced or stored twice.

    If `counted` is given, only this number of bytes of the record is compared. Frames are compared by their
    descriptions. If `contents` is true, all bytes are also compared with their checksums.
    """
    rows = _rows_of(run, folder, counted)
    # The files are read after the record, so that everything in the record exists by then, even while the run continues.
    frames: dict[int, list[tuple[Path, Frame]]] = {}
    whole: dict[int, Stored] = {}
    for path in packed_files(run / folder):
        try:
            with reading(path, missing=True):
                packed = scan(path) if contents else known_scan(path)
        except FileNotFoundError:  # either deleted by the run itself, or reported below
            continue
        whole |= whole_steps(path, packed)
        for frame in packed.frames:
            frames.setdefault(frame.step, []).append((path, frame))
    found: list[LostRows] = []
    for step, row in rows.items():
        own = frames.get(step, [])
        fault: str | None
        file: Path | None
        if step in whole:
            fault, file = _fault(whole[step], row, contents=contents), whole[step].file
            if fault is None and len(own) > len(whole[step].frames):
                fault, file = TWICE, own[-1][0]
        else:
            fault, file = (CUT, own[0][0]) if own else (MISSING, None)
        if fault is not None:
            found.append(LostRows(folder, step, fault, file))
    before = forgotten(run).get(folder, -1)  # read last, because it is written before anything is deleted
    return [loss for loss in found if loss.step >= before or loss.fault not in (MISSING, CUT)]


def _fault(stored: Stored, row: Mapping[str, Any], *, contents: bool) -> str | None:
    if _digest(stored.frames) != row["frames"]:
        return REPLACED
    if contents:
        try:
            with reading(stored.file, missing=True), stored.file.open("rb") as file:
                for frame in stored.frames:
                    file.seek(frame.offset)
                    if zlib.crc32(file.read(frame.packed)) != frame.crc:
                        return UNREADABLE
        except FileNotFoundError:
            return MISSING
    return None


def check_step(run: Path, folder: str, step: int, stored: Stored | None) -> None:
    """Raise DataError if a step was recorded and `stored` does not contain its rows."""
    row = _rows_of(run, folder).get(step)
    if row is None or (stored is None and step < forgotten(run).get(folder, -1)):
        return
    fault = MISSING if stored is None else _fault(stored, row, contents=False)
    if fault is not None:
        (line,) = as_lines([LostRows(folder, step, fault, None if stored is None else stored.file)])
        raise DataError(f"{run if stored is None else stored.file}: {line}. Restore them from a copy.")


def all_losses(run: Path, *, contents: bool = False) -> list[str]:
    """Return a line for everything in the record of a run that is lost or changed. The result is empty for an intact run."""
    # Steps that have a row of metrics; `read_metrics` reports damaged rows.
    steps: list[int] = []
    with suppress(OSError):
        rows = plain_bytes(run / "metrics.jsonl").split(b"\n")[:-1]
        steps = sorted({int(start[1]) for row in rows if (start := _STEP.match(row))})
    lines = []
    for folder in FOLDERS:
        try:
            lines += as_lines(losses(run, folder, contents=contents))
        except (RunDirectoryError, OSError) as error:
            lines.append(str(error))
    try:
        by_folder, bad = _record(run)
    except RunDirectoryError:  # reported above
        return lines
    if bad:
        lines.append(f"{len(bad)} lines of {RECORDED} are damaged, the first of them line {bad[0]}")
    known = by_folder.get(FOLDERS[0], {})
    # The newest step may be in progress.
    lost = [step for step in steps[:-1] if step not in known]
    if lost:
        lines.append(f"{RECORDED} has lost the rows of {_steps(lost)}, so their episodes cannot be checked")
    return lines


def check_recorded(run: Path, positions: Mapping[str, int]) -> list[str]:
    """Raise RunDirectoryError if the rows that a checkpoint counts differ from the record.

    A folder without any files is assumed to have been emptied on purpose. The missing steps of such a folder are
    returned as lines, and training may continue.
    """
    remarks: list[str] = []
    wrong: list[str] = []
    for folder in FOLDERS:
        files = packed_files(run / folder)
        found = losses(run, folder, positions.get(RECORDED, 0), contents=True)
        (wrong if files else remarks).extend(as_lines(found))
        last = positions.get(folder, -1)
        if files and not found and last >= 0:
            with reading(run / folder):
                is_there = any(last in scan(path).steps for path in files)
            if not is_there:
                wrong.append(
                    f"the {_CONTENTS[folder]} of step {last}, which the checkpoint counts as the last, {MISSING}"
                )
    if wrong:
        raise RunDirectoryError(
            f"{run} has lost what its checkpoint counts: {'; '.join(wrong)}. Restore the files "
            "from a copy, go back further with `kapelle runs rollback`, or move the damaged folder "
            f"(such as {run / FOLDERS[0]}) out of the run: the run then continues without its "
            "contents, and reports that."
        )
    return remarks


def as_lines(found: Sequence[LostRows]) -> list[str]:
    """Return a line for each folder and each kind of problem, with the affected steps and files."""
    kinds: dict[tuple[str, str], list[LostRows]] = {}
    for loss in found:
        kinds.setdefault((loss.folder, loss.fault), []).append(loss)
    lines = []
    for (folder, fault), own in kinds.items():
        names = sorted({f"{folder}/{loss.file.name}" for loss in own if loss.file is not None}) or [folder]
        where = f" ({', '.join(names[:3])}{' and others' if len(names) > 3 else ''})"
        lines.append(f"the {_CONTENTS[folder]} of {_steps([loss.step for loss in own])} {fault}{where}")
    return lines


def forgotten(run: Path) -> dict[str, int]:
    """Return, for each folder, the step before which the run itself may have deleted rows."""
    try:
        with reading(run / FORGOTTEN, missing=True):
            found = json.loads(plain_bytes(run / FORGOTTEN))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {folder: found[folder] for folder in FOLDERS if type(found.get(folder)) is int}


def _digest(frames: Sequence[Frame]) -> str:
    about = [(f.step, f.first, f.rows, f.total, f.unpacked, f.packed, f.crc) for f in frames]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _rows_of(run: Path, folder: str, counted: int | None = None) -> Mapping[int, Mapping[str, Any]]:
    return _record(run, counted)[0].get(folder, {})


_Record = tuple[Mapping[str, Mapping[int, Mapping[str, Any]]], Sequence[int]]


def _record(run: Path, counted: int | None = None) -> _Record:
    """Return what a run has recorded by folder and step, and the numbers of the damaged lines."""
    path = run / RECORDED
    try:
        with reading(path, missing=True):
            about = path.stat()
            if counted is not None:  # a resume does not use the cache
                return _parsed.__wrapped__(path, counted, ())
            return _parsed(path, None, (about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns))
    except FileNotFoundError:
        return {}, ()


@lru_cache(maxsize=64)
def _parsed(path: Path, counted: int | None, _version: tuple[int, ...]) -> _Record:
    found: dict[str, dict[int, Mapping[str, Any]]] = {folder: {} for folder in FOLDERS}
    bad = []
    for number, line in enumerate(plain_bytes(path)[:counted].split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            step, by_step = row["step"], found[row["folder"]]
            if not (type(step) is int and type(row["sha256"]) is type(row["frames"]) is str):
                raise TypeError(step)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            bad.append(number)
        else:
            by_step[step] = row
    return found, bad


def _steps(steps: Sequence[int]) -> str:
    """Format a list of steps, for example as `step 4` or as `steps 1 to 3, 7 and 9 to 12`."""
    ranges: list[list[int]] = []
    for step in sorted(set(steps)):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    parts = [str(a) if a == b else f"{a} to {b}" for a, b in ranges]
    if len(parts) > 8:
        parts = [*parts[:7], f"{len(steps) - sum(b - a + 1 for a, b in ranges[:7])} others"]
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"step{'' if len(set(steps)) == 1 else 's'} {joined}"
