"""Rows of JSON by step in a folder of a run, in either form: what every reader of episodes goes through.

    00000012.jsonl         the rows of step 12, one per line, as older versions wrote them
    00000012.jsonl.zst     the rows of several steps from 12 on, compressed; see `packed_rows`

    for step, stored in stored_steps(run / "episodes" / "train").items():
        for line in lines_of(stored):
            ...

A step that is there in both forms is read from its own file. Nothing is cached but where frames are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kapelle.errors import DataError, RunDirectoryError
from kapelle.runs.packed_rows import Frame, Packed, known_scan, scan, unpack
from kapelle.runtime.files import check_plain

_NAME = re.compile(r"([0-9]{1,12})\.jsonl(\.zst)?")
PLAIN, PACKED = ".jsonl", ".jsonl.zst"


@dataclass(frozen=True, slots=True)
class Stored:
    """Where the rows of a step are."""

    step: int
    file: Path
    frames: tuple[Frame, ...] = ()
    """Where in the file, in order; empty for a plain one."""

    @property
    def size(self) -> int:
        """Bytes of its rows, not compressed; nothing is unpacked for it. OSError where the file is gone."""
        return sum(frame.unpacked for frame in self.frames) if self.frames else self.file.stat().st_size


def plain_file(folder: Path, step: int) -> Path:
    """Return the file with the rows of one step alone."""
    return folder / f"{step:08d}{PLAIN}"


def first_step(file: Path) -> int:
    """Return the step that a file is named after."""
    return int(file.name.partition(".")[0])


def packed_files(folder: Path) -> list[Path]:
    """Return the compressed files of a folder by their first step; empty where there is no folder, OSError where it cannot be read."""
    return [path for _, path in sorted(_files(folder, packed=True))]


def plain_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the steps that have a plain file, with it, in ascending order; otherwise like `packed_files`."""
    return sorted(_files(folder, packed=False))


def stored_steps(folder: Path) -> dict[int, Stored]:
    """Return where the rows of every step are, in ascending order; a file that cannot be read or is damaged has none."""
    found: dict[int, Stored] = {}
    try:
        files, plain = packed_files(folder), plain_files(folder)
    except OSError:
        return found
    for path in files:
        try:
            packed = known_scan(path)
        except OSError:
            continue
        found |= whole_steps(path, packed)
    found |= {step: Stored(step, path) for step, path in plain}
    return dict(sorted(found.items()))


def whole_steps(path: Path, packed: Packed) -> dict[int, Stored]:
    """Return the steps that a compressed file holds whole."""
    return {step: Stored(step, path, frames) for step, frames in packed.steps.items()}


def stamps(folder: Path) -> dict[int, tuple[int, int]]:
    """Return two numbers for every step that change with its rows, for caches: in one look at the folder, and in no order."""
    found: dict[int, tuple[int, int]] = {}
    plain: dict[int, tuple[int, int]] = {}
    packed: list[tuple[int, str]] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match and match[2]:
                packed.append((int(match[1]), entry.name))
            elif match:
                with suppress(OSError):
                    about = entry.stat()
                    plain[int(match[1])] = about.st_size, about.st_mtime_ns
    for _, name in sorted(packed):
        with suppress(OSError):
            found |= {step: _mixed(frames) for step, frames in known_scan(folder / name).steps.items()}
    return found | plain


def last_step(folder: Path) -> int:
    """Return the last step whose rows are there, -1 for none; nothing is remembered. RunDirectoryError where that cannot be read."""
    with _in_words(folder):
        plain, files = max((step for step, _ in plain_files(folder)), default=-1), packed_files(folder)
    for path in reversed(files):
        if steps := _scanned(path).steps:
            return max(plain, *steps)
    return plain


def stored_step(folder: Path, step: int) -> Stored | None:
    """Return where the rows of a step are, None where they are not recorded.

    Raises DataError where they are missing and a file that may have held them is damaged, RunDirectoryError where that
    file cannot be read.
    """
    plain = plain_file(folder, step)
    if plain.exists():
        return Stored(step, plain)
    wrong = None
    # The file with the nearest first step before it holds it, unless a step was recorded late.
    with _in_words(folder):
        files = packed_files(folder)
    for path in sorted(files, key=lambda each: (first_step(each) > step, -first_step(each))):
        packed = _scanned(path)
        if step in packed.steps:
            return Stored(step, path, packed.steps[step])
        wrong = wrong or (packed.fault and f"{path} cannot be read: {packed.fault}. Restore it from a copy.")
    if wrong:
        raise DataError(wrong)
    return None


def refuse_damage(folder: Path) -> None:
    """Raise DataError where a compressed file has lost rows to damage, RunDirectoryError where it cannot be read."""
    with _in_words(folder):
        files = packed_files(folder)
    for path in files:
        fault = _scanned(path).fault
        if fault is not None:
            raise DataError(f"{path} cannot be read: {fault}. Restore it from a copy.")


def damaged(folder: Path) -> list[str]:
    """Return the names of the compressed files of a folder that have lost rows to damage or cannot be read."""
    try:
        files = packed_files(folder)
    except OSError:
        return []
    found = []
    for path in files:
        try:
            fault = known_scan(path).fault
        except FileNotFoundError:
            continue
        except OSError as error:
            fault = str(error)
        if fault is not None:
            found.append(path.name)
    return found


def lines_of(stored: Stored, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Yield the complete lines of a step from row `start` to before row `stop`, without their newlines.

    Only the frames that hold them are unpacked, one after another. Raises DataError for damage, and RunDirectoryError
    where the file cannot be read.
    """
    with _in_words(stored.file):
        if not stored.frames:
            check_plain(stored.file, stored.file.stat().st_mode)
            with stored.file.open("rb") as file:
                for line in islice(file, start, stop):
                    if line.endswith(b"\n"):  # or it is half a row that is being written
                        yield line[:-1]
            return
        for frame in stored.frames:
            end = frame.first + frame.rows
            if end > start and (stop is None or frame.first < stop):
                low = max(0, start - frame.first)
                high = None if stop is None else stop - frame.first
                yield from unpack(stored.file, frame)[low:high]


def _mixed(frames: tuple[Frame, ...]) -> tuple[int, int]:
    mixed = 0
    for frame in frames:
        mixed = (mixed * 31 + frame.crc) % 2**61
    return sum(frame.packed for frame in frames), mixed


def _files(folder: Path, *, packed: bool) -> Iterator[tuple[int, Path]]:
    try:
        entries = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in entries:
        match = _NAME.fullmatch(path.name)
        if match and bool(match[2]) == packed:
            yield int(match[1]), path


def _scanned(path: Path) -> Packed:
    with _in_words(path):
        return scan(path)


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"Cannot read {path}: {error.strerror}. Is it a run directory that this user may read, on a disk without faults?"
        ) from error
