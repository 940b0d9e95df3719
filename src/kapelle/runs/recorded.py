"""What a run has recorded by step, and whether all of it is still there.

    recorded.jsonl     a row for each step of a folder, appended once its rows are written:
                       {"step": 12, "folder": "episodes/train", "rows": 64, "sha256": …, "frames": …}
    forgotten.json     by folder, the step before which the run itself may have deleted what it no longer keeps

`sha256` is that of the lines; `frames` that of the descriptions of the compressed frames which hold them (their places in the
step, sizes and checksums), so that a step is recognised without being unpacked. The row comes last: the step that a
killed process was writing has none, and is not missed.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
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
    lines_of,
    packed_files,
    plain_files,
    reading,
    scan,
    whole_steps,
)
from kapelle.runtime.files import plain_bytes
from kapelle.types import Json

RECORDED = "recorded.jsonl"
FORGOTTEN = "forgotten.json"
FOLDERS = ("episodes/train", "episodes/test", "traces")
_WHAT = {"episodes/train": "episodes", "episodes/test": "test episodes", "traces": "traces"}
_STEP = re.compile(rb'\{"step": (\d{1,12})[,}]')
"""How the writer begins a row of metrics: what tells its step without parsing the rest."""
MISSING = "are missing"
CUT = "have lost rows"
REPLACED = "are not those that the run recorded"
TWICE = "stand there twice"
UNREADABLE = "are damaged"


@dataclass(frozen=True, slots=True)
class LostRows:
    """A step whose rows are no longer what was recorded."""

    folder: str
    step: int
    what: str
    """In words, behind a plural."""
    file: Path | None = None


def described(folder: str, content: bytes, data: bytes) -> dict[str, Json]:
    """Return what is recorded of a step's lines and the frames that hold them, but for the step."""
    return {
        "folder": folder,
        "rows": content.count(b"\n"),
        "sha256": hashlib.sha256(content).hexdigest(),
        "frames": _digest(frames_of(data)),
    }


def losses(run: Path, folder: str, counted: int | None = None, *, contents: bool = False) -> list[LostRows]:
    """Return the steps of a folder that were recorded and are missing, cut, replaced or there twice.

    `counted` limits it to the first bytes of the record. Compressed rows are compared by their frames' descriptions; with
    `contents` all bytes are compared with their checksums too.
    """
    rows = _rows_of(run, folder, counted)
    # Read after the record, so that everything recorded is there, also while the run continues.
    plain = dict(plain_files(run / folder))
    frames: dict[int, list[tuple[Path, Frame]]] = {}
    whole: dict[int, Stored] = {}
    for path in packed_files(run / folder):
        try:
            with reading(path, missing=True):
                packed = scan(path) if contents else known_scan(path)
        except FileNotFoundError:  # deleted since by the run itself, or missed below
            continue
        whole |= whole_steps(path, packed)
        for frame in packed.frames:
            frames.setdefault(frame.step, []).append((path, frame))
    found: list[LostRows] = []
    for step, row in rows.items():
        own = frames.get(step, [])
        if step in plain:
            fault = _fault(Stored(step, plain[step]), row, contents=contents)
            file: Path | None = plain[step]
        elif step in whole:
            fault, file = _fault(whole[step], row, contents=contents), whole[step].file
            if fault is None and len(own) > len(whole[step].frames):
                fault, file = TWICE, own[-1][0]
        else:
            fault, file = (CUT, own[0][0]) if own else (MISSING, None)
        if fault is not None:
            found.append(LostRows(folder, step, fault, file))
    before = forgotten(run).get(folder, -1)  # read last: it is written before anything is deleted
    return [loss for loss in found if loss.step >= before or loss.what not in (MISSING, CUT)]


def _fault(stored: Stored, row: Mapping[str, Any], *, contents: bool) -> str | None:
    try:
        if not stored.frames:
            own = hashlib.sha256()
            for line in lines_of(stored):
                own.update(line + b"\n")
            return None if own.hexdigest() == row["sha256"] else REPLACED
        if _digest(stored.frames) != row["frames"]:
            return REPLACED
        if contents:
            with reading(stored.file, missing=True), stored.file.open("rb") as file:
                for frame in stored.frames:
                    file.seek(frame.offset)
                    if zlib.crc32(file.read(frame.packed)) != frame.crc:
                        return UNREADABLE
    except FileNotFoundError:
        return MISSING
    except DataError:
        return UNREADABLE
    return None


def refuse_loss(run: Path, folder: str, step: int, stored: Stored | None) -> None:
    """Raise DataError where a step was recorded and these are not its rows."""
    row = _rows_of(run, folder).get(step)
    if row is None or (stored is None and step < forgotten(run).get(folder, -1)):
        return
    fault = MISSING if stored is None else _fault(stored, row, contents=False)
    if fault is not None:
        (line,) = in_words([LostRows(folder, step, fault, None if stored is None else stored.file)])
        raise DataError(f"{run if stored is None else stored.file}: {line}. Restore them from a copy.")


def all_losses(run: Path, *, contents: bool = False) -> list[str]:
    """Return, in words, all that a run has recorded and that cannot be read back as it was; empty for a sound run."""
    # Steps that have a row of metrics; damaged rows are skipped, and reported by `read_metrics`.
    metrics: list[int] = []
    with suppress(OSError):
        rows = plain_bytes(run / "metrics.jsonl").split(b"\n")[:-1]
        metrics = sorted({int(begun[1]) for row in rows if (begun := _STEP.match(row))})
    lines = []
    for folder in FOLDERS:
        try:
            lines += in_words(losses(run, folder, contents=contents))
        except (RunDirectoryError, OSError) as error:
            lines.append(str(error))
    try:
        bad = _record(run)[1]
    except RunDirectoryError:  # reported above
        return lines
    if bad:
        lines.append(f"{len(bad)} lines of {RECORDED} are damaged, the first is line {bad[0]}")
    known = _rows_of(run, FOLDERS[0])
    # The newest step may still be under way.
    lost = [step for step in metrics[:-1] if known and step > min(known) and step not in known]
    if lost:
        lines.append(
            f"{RECORDED} has lost the rows of {_steps(lost)}: whether their episodes are whole is not known"
        )
    if (
        not known
    ):  # a run without a record: steps with metrics and no episodes, behind the first that has some
        there = {*_all_steps(run / FOLDERS[0])}
        lost = [step for step in metrics[:-1] if there and step > min(there) and step not in there]
        if not there and len(metrics) > 1:
            lost = metrics[:-1]
        lines += in_words([LostRows(FOLDERS[0], step, MISSING) for step in lost])
    return lines


def refuse_losses(run: Path, positions: Mapping[str, int]) -> list[str]:
    """Raise RunDirectoryError where rows by step that a checkpoint counts are not as they were recorded.

    An empty folder was emptied on purpose: what is missing is returned, in words, and training may continue.
    """
    remarks: list[str] = []
    wrong: list[str] = []
    for folder in FOLDERS:
        empty = not packed_files(run / folder) and not plain_files(run / folder)
        found = losses(run, folder, positions.get(RECORDED, 0), contents=True)
        (remarks if empty else wrong).extend(in_words(found))
        last = positions.get(folder, -1)
        if not empty and not found and last >= 0 and last not in {*_all_steps(run / folder)}:
            wrong.append(
                f"the {_WHAT[folder]} of step {last}, which the checkpoint counts as the last, {MISSING}"
            )
    if wrong:
        raise RunDirectoryError(
            f"{run} has lost what its checkpoint counts: {'; '.join(wrong)}. Restore the files from a copy, go back further with "
            f"`kapelle runs rollback`, or move the damaged folder (such as {run / FOLDERS[0]}) out of the run: it then "
            "continues without what was in there, and says so."
        )
    return remarks


def in_words(found: Sequence[LostRows]) -> list[str]:
    """Return lines that name the steps of losses, of each kind and folder together, and their files."""
    kinds: dict[tuple[str, str], list[LostRows]] = {}
    for loss in found:
        kinds.setdefault((loss.folder, loss.what), []).append(loss)
    lines = []
    for (folder, what), own in kinds.items():
        names = sorted({f"{folder}/{loss.file.name}" for loss in own if loss.file is not None})
        where = (
            f" ({', '.join(names[:3])}{' and others' if len(names) > 3 else ''})" if names else f" ({folder})"
        )
        lines.append(f"the {_WHAT[folder]} of {_steps([loss.step for loss in own])} {what}{where}")
    return lines


def forgotten(run: Path) -> dict[str, int]:
    """Return by folder the step before which the run may have deleted rows itself."""
    try:
        with reading(run / FORGOTTEN, missing=True):
            found = json.loads(plain_bytes(run / FORGOTTEN))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return {
        folder: found[folder]
        for folder in FOLDERS
        if isinstance(found, dict) and type(found.get(folder)) is int
    }


def _all_steps(folder: Path) -> Iterator[int]:
    for path in packed_files(folder):
        with reading(path, missing=True):
            steps = scan(path).steps
        yield from steps
    yield from (step for step, _ in plain_files(folder))


def _digest(frames: Sequence[Frame]) -> str:
    told = [(f.step, f.first, f.rows, f.total, f.unpacked, f.packed, f.crc) for f in frames]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _rows_of(run: Path, folder: str, counted: int | None = None) -> Mapping[int, Mapping[str, Any]]:
    return _record(run, counted)[0].get(folder, {})


_Record = tuple[Mapping[str, Mapping[int, Mapping[str, Any]]], Sequence[int]]


def _record(run: Path, counted: int | None = None) -> _Record:
    """Return by folder and step what a run has recorded, and the numbers of damaged lines."""
    path = run / RECORDED
    try:
        with reading(path, missing=True):
            about = path.stat()
            if counted is not None:  # a resume looks for itself
                return _parsed.__wrapped__(path, counted, ())
            return _parsed(path, None, (about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns))
    except FileNotFoundError:
        return {}, ()


@lru_cache(maxsize=64)
def _parsed(path: Path, counted: int | None, _mark: tuple[int, ...]) -> _Record:
    found: dict[str, dict[int, Mapping[str, Any]]] = {folder: {} for folder in FOLDERS}
    bad = []
    for number, line in enumerate(plain_bytes(path)[:counted].split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            step, folder = row["step"], row["folder"]
            by_step = found[folder]
            sound = type(step) is int and type(row["sha256"]) is type(row["frames"]) is str
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            bad.append(number)
            continue
        if sound:
            by_step[step] = row
        else:
            bad.append(number)
    return found, bad


def _steps(steps: Sequence[int]) -> str:
    """Return `step 4`, or `steps 1 to 3, 7 and 9 to 12`."""
    runs: list[list[int]] = []
    for step in sorted(set(steps)):
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    parts = [str(a) if a == b else f"{a} to {b}" for a, b in runs]
    if len(parts) > 8:
        parts = [*parts[:7], f"{len(steps) - sum(b - a + 1 for a, b in runs[:7])} others"]
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"step{'' if len(set(steps)) == 1 else 's'} {joined}"
