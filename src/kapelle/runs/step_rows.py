"""Stores JSON rows by step in a folder of a run. This module compresses, writes, finds, reads and removes episodes and traces.

A file such as `00000012.jsonl.zst` holds the rows of several steps, of which step 12 is the first.

    for step, stored in stored_steps(run / "episodes" / "train").items():
        for line in lines_of(stored):
            ...
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kapelle.errors import DataError, RunDirectoryError
from kapelle.runtime.files import check_plain, replace_file, write_all

# -------- One compressed file, which grows by whole frames.
#
# A file is a sequence of Zstandard frames (RFC 8878): a *skippable* frame that describes the next frame, then that frame,
# which holds complete lines. `zstd -dc FILE` therefore prints all lines. The description is, in little-endian order:
#
#     tag "kpl1" · step u64 · first row u32 · rows u32 · rows of the whole step u32 · bytes unpacked u32 · bytes packed u32 ·
#     CRC-32 of the packed bytes u32 · CRC-32 of this description u32
#
# Descriptions are the index: they locate each frame. A step is complete when it has all of its rows. A killed
# process leaves at most a step without its last rows or half a frame; readers skip both. Readers also skip damage, up to
# the next description, and report it in `Packed.fault`.

FRAME = 1 << 20
"""The approximate number of bytes of lines after which a frame ends."""
LARGEST = 256 << 20
"""The maximum decompressed size of a frame in bytes. A frame of this size holds a single row. A larger frame is treated as a
decompression bomb."""
LAST_STEP = 10**12
"""An upper bound for steps. Every step is smaller than this number, because file names have twelve digits."""
LEVEL = 6
"""The compression level."""
_SKIPPABLE = struct.Struct("<II")
_MAGIC = 0x184D2A5E
_ABOUT = struct.Struct("<4sQIIIIII")
_CHECK = struct.Struct("<I")
_TAG = b"kpl1"
_SEARCHES = 100
"""The number of damaged places after which the rest of a file is skipped."""
_HEAD = _SKIPPABLE.size + _ABOUT.size + _CHECK.size
_BEGIN = _SKIPPABLE.pack(_MAGIC, _ABOUT.size + _CHECK.size) + _TAG


@dataclass(frozen=True, slots=True)
class Frame:
    """Some rows of a step, and their position in the file."""

    step: int
    first: int
    """The index of the first row of the frame in its step, from 0."""
    rows: int
    total: int
    """The number of rows of the whole step."""
    unpacked: int
    """The size of the uncompressed lines in bytes."""
    packed: int
    """The size of the frame in the file in bytes, without its description."""
    crc: int
    """The CRC-32 checksum of the compressed bytes."""
    offset: int
    """The position in the file at which the compressed bytes begin."""

    @property
    def start(self) -> int:
        """The position in the file at which the description of the frame begins."""
        return self.offset - _HEAD

    @property
    def end(self) -> int:
        """The position in the file at which the next frame begins."""
        return self.offset + self.packed


@dataclass(frozen=True, slots=True)
class Packed:
    """The content of a file according to the descriptions of its frames."""

    frames: tuple[Frame, ...]
    """All frames, in the order of the file."""
    steps: dict[int, tuple[Frame, ...]]
    """The frames of every complete step."""
    fault: str | None
    """The position at which the file is damaged, or None if the file is intact or ends with rows that are still being written."""

    @property
    def end(self) -> int:
        """The position in the file at which the last frame ends."""
        return self.frames[-1].end if self.frames else 0


def pack(step: int, lines: Sequence[bytes]) -> bytes:
    """Return the frames for the lines of a step, each of which must end with a newline. Raises DataError for a line that is too large."""
    import zstandard

    compressor = zstandard.ZstdCompressor(level=LEVEL)
    content = []
    begins, size = [0], 0  # a step without lines is one empty frame
    for k, line in enumerate(lines):
        if k > begins[-1] and size + len(line) > FRAME:
            begins.append(k)
            size = 0
        size += len(line)
    for first, end in zip(begins, [*begins[1:], len(lines)], strict=True):
        raw = b"".join(lines[first:end])
        if len(raw) > LARGEST:
            raise DataError(
                f"A row of step {step} has {len(raw)} bytes, but at most {LARGEST} can be stored."
            )
        packed = compressor.compress(raw)
        about = _ABOUT.pack(
            _TAG, step, first, end - first, len(lines), len(raw), len(packed), zlib.crc32(packed)
        )
        head = _SKIPPABLE.pack(_MAGIC, _ABOUT.size + _CHECK.size)
        content.append(head + about + _CHECK.pack(zlib.crc32(about)) + packed)
    return b"".join(content)


def known_scan(path: Path) -> Packed:
    """Return the cached result of `scan`. The file is scanned again if it has changed."""
    about = path.stat()
    return _scan_version(path, about.st_ino, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=4096)
def _scan_version(path: Path, *_version: int) -> Packed:
    return scan(path)


def scan(path: Path) -> Packed:
    """Return the content of a file according to the descriptions of its frames. Raises OSError if the file cannot be read."""
    about = path.stat()
    check_plain(path, about.st_mode)
    size = about.st_size
    found: dict[int, list[Frame]] = {}
    fault, searches = None, 0
    with path.open("rb") as file:
        at = 0
        while at + _HEAD <= size and searches <= _SEARCHES:
            file.seek(at)
            frame = _described(file.read(_HEAD), at)
            if frame is None:
                fault = fault or f"it is damaged at byte {at}"
                searches += 1
                # Search for the next description.
                start, at = at + 1, size
                while start < size and at == size:
                    file.seek(start)
                    found_at = file.read(FRAME).find(_BEGIN)
                    if found_at >= 0:
                        at = start + found_at
                    start += FRAME - len(_BEGIN) + 1
                continue
            if frame.end > size:
                break
            found.setdefault(frame.step, []).append(frame)
            at = frame.end
    frames = tuple(sorted((frame for own in found.values() for frame in own), key=lambda frame: frame.offset))
    steps = {step: whole for step, own in found.items() if (whole := _whole(own))}
    return Packed(frames, steps, fault)


def frames_of(data: bytes) -> list[Frame]:
    """Return the frames in bytes that were created by `pack`."""
    found: list[Frame] = []
    while len(data) > (at := found[-1].end if found else 0):
        frame = _described(data[at : at + _HEAD], at)
        assert frame is not None, "these are the bytes of `pack`"
        found.append(frame)
    return found


def _described(head: bytes, at: int) -> Frame | None:
    if len(head) < _HEAD or not head.startswith(_BEGIN):
        return None
    about = head[_SKIPPABLE.size : -_CHECK.size]
    if _CHECK.unpack(head[-_CHECK.size :])[0] != zlib.crc32(about):
        return None
    _, step, first, rows, total, unpacked, packed, crc = _ABOUT.unpack(about)
    return Frame(step, first, rows, total, unpacked, packed, crc, at + _HEAD) if step < LAST_STEP else None


def _whole(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the frames of a step in order if the step is complete, otherwise an empty tuple."""
    # A damaged file may hold a frame twice; such a frame counts once.
    ordered = sorted({frame.first: frame for frame in frames}.values(), key=lambda frame: frame.first)
    row = 0
    for frame in ordered:
        if frame.first != row or frame.total != ordered[0].total:
            return ()
        row += frame.rows
    return tuple(ordered) if row == ordered[0].total else ()


def unpack(path: Path, frame: Frame) -> list[bytes]:
    """Return the lines of a frame, without their newlines. Raises DataError for a damaged frame, and OSError if the file cannot be read."""
    import zstandard

    with path.open("rb") as file:
        file.seek(frame.offset)
        packed = file.read(min(frame.packed, LARGEST))
    differs = "its content does not match its description"
    wrong = None
    raw = b""
    if len(packed) != frame.packed or zlib.crc32(packed) != frame.crc:
        wrong = "its content has changed"
    elif frame.unpacked > (LARGEST if frame.rows == 1 else FRAME):
        wrong = f"they would decompress to {frame.unpacked} bytes"
    else:
        try:
            if zstandard.get_frame_parameters(packed).content_size != frame.unpacked:
                wrong = differs
            else:
                raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=frame.unpacked)
        except (zstandard.ZstdError, ValueError, MemoryError) as error:
            wrong = str(error)
    lines = raw.split(b"\n")
    if wrong is None and (lines.pop() or len(lines) != frame.rows):
        wrong = differs
    if wrong is not None:
        last = frame.first + frame.rows - 1
        raise DataError(
            f"{path} is damaged: rows {frame.first} to {last} of step {frame.step} cannot be "
            f"decompressed: {wrong}. "
            "Restore it from a copy."
        )
    return lines


PACKED = ".jsonl.zst"
_NAME = re.compile(r"([0-9]{1,12})\.jsonl\.zst")


@dataclass(frozen=True, slots=True)
class Stored:
    """The location of the stored rows of one step."""

    step: int
    file: Path
    frames: tuple[Frame, ...]
    """The frames of the step in the file, in order."""

    @property
    def size(self) -> int:
        """The decompressed size of the rows in bytes, according to the descriptions of the frames."""
        return sum(frame.unpacked for frame in self.frames)


def first_step(file: Path) -> int:
    """Return the step that is contained in the name of a file."""
    return int(file.name.partition(".")[0])


def packed_files(folder: Path) -> list[Path]:
    """Return the files of a folder, ordered by their first step, or an empty list if there is no folder.

    Raises OSError if the folder cannot be read.
    """
    try:
        return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=first_step)
    except (FileNotFoundError, NotADirectoryError):
        return []


def stored_steps(folder: Path) -> dict[int, Stored]:
    """Return the location of the rows of each step, in ascending order.

    Steps in files that are damaged or cannot be read are omitted.
    """
    found: dict[int, Stored] = {}
    with suppress(OSError):
        for path in packed_files(folder):
            with suppress(OSError):
                found |= whole_steps(path, known_scan(path))
    return dict(sorted(found.items()))


def whole_steps(path: Path, packed: Packed) -> dict[int, Stored]:
    """Return the complete steps of a file."""
    return {step: Stored(step, path, frames) for step, frames in packed.steps.items()}


def last_step(folder: Path) -> int:
    """Return the last complete step, or -1 if there is none, without using the cache.

    Raises RunDirectoryError if a file cannot be read.
    """
    with reading(folder):
        for path in reversed(packed_files(folder)):
            if steps := scan(path).steps:
                return max(steps)
    return -1


def stored_step(folder: Path, step: int) -> Stored | None:
    """Return the location of the rows of a step, or None if the step is not recorded.

    Raises DataError if the rows are missing and a damaged file may have held them, and RunDirectoryError if a file
    cannot be read.
    """
    fault = None
    with reading(folder):
        files = packed_files(folder)
    # Unless the step was recorded late, it is in the file with the nearest first step at or before it.
    for path in sorted(files, key=lambda each: (first_step(each) > step, -first_step(each))):
        with reading(path):
            packed = scan(path)
        if step in packed.steps:
            return Stored(step, path, packed.steps[step])
        fault = fault or (packed.fault and f"{path} cannot be read: {packed.fault}. Restore it from a copy.")
    if fault:
        raise DataError(fault)
    return None


def check_damage(folder: Path) -> None:
    """Raise DataError for a file that has lost rows because of damage, and RunDirectoryError for a file that cannot be read."""
    with reading(folder):
        for path in packed_files(folder):
            fault = scan(path).fault
            if fault is not None:
                raise DataError(f"{path} cannot be read: {fault}. Restore it from a copy.")


def damaged(folder: Path) -> list[str]:
    """Return the names of the files of a folder that are damaged or cannot be read."""
    found = []
    with suppress(OSError):
        for path in packed_files(folder):
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
    """Yield the lines of a step from row `start` up to, but not including, row `stop`, without their newlines.

    Only the frames that contain these rows are decompressed, one after another. Raises DataError for damaged frames,
    and RunDirectoryError if the file cannot be read.
    """
    with reading(stored.file):
        for frame in stored.frames:
            if frame.first + frame.rows > start and (stop is None or frame.first < stop):
                low = max(0, start - frame.first)
                high = None if stop is None else stop - frame.first
                yield from unpack(stored.file, frame)[low:high]


@contextmanager
def reading(path: Path, *, missing: bool = False) -> Iterator[None]:
    """Convert OSError inside the block to RunDirectoryError. If `missing` is true, FileNotFoundError is raised unchanged."""
    try:
        yield
    except OSError as error:
        if missing and isinstance(error, FileNotFoundError):
            raise
        raise RunDirectoryError(
            f"Cannot read {error.filename or path}: {error.strerror}. Check that it is in a run "
            "directory, that this user may read it, and that the disk works."
        ) from error


# -------- Writing steps, and removing them.
# A step is appended to the newest file with one write. A file is complete when it has `STEPS` steps or `SIZE` bytes;
# the next step begins another file, which is named after that step. The same steps result in the same files, however
# often a run was killed and resumed. These functions raise OSError.

STEPS = 16
SIZE = 16 << 20


@dataclass(frozen=True, slots=True)
class LaterRows:
    """The rows in a file that belong to steps after a given step."""

    file: Path
    name: str
    """The name for a file that holds only these steps."""
    steps: tuple[int, ...]
    before: bytes | None = None
    """The content that remains in the file, or None if the whole file is removed."""
    after: bytes = b""
    """The content to remove if only part of the file is removed; otherwise empty."""


def append_step(folder: Path, step: int, content: bytes) -> tuple[Path, bytes]:
    """Append the lines of a step, which must not be recorded yet, and return the file and the appended bytes.

    The file is not flushed to the disk.
    """
    data = pack(step, content.splitlines(keepends=True))
    newest = next(reversed(packed_files(folder)), None)
    if newest is not None:
        packed, size = scan(newest), newest.stat().st_size
        assert step not in packed.steps, f"step {step} is recorded once"
        if len(packed.steps) < STEPS and packed.end == size < SIZE:
            descriptor = os.open(newest, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            try:
                about = os.fstat(descriptor)
                if about.st_nlink > 1:  # a copy of the run with hard links shares the file
                    replace_file(newest, newest.read_bytes() + data, sync=False)
                    return newest, data
                try:
                    write_all(descriptor, data)
                except OSError:
                    with suppress(OSError):  # part of it may be on the disk if the disk is full
                        os.ftruncate(descriptor, about.st_size)
                    raise
            finally:
                os.close(descriptor)
            return newest, data
    path = folder / f"{step:08d}{PACKED}"
    replace_file(path, data, sync=False)
    return path, data


def later_parts(folder: Path, last: int) -> list[LaterRows]:
    """Return the parts of the files of a folder that hold steps after `last`, including incomplete rows."""
    later: list[LaterRows] = []
    files = packed_files(folder)
    begun = sum(first_step(path) <= last for path in files)
    # Steps are recorded in order, so only the last file that begins at or before `last`, and later files, hold later steps.
    for path in files[max(0, begun - 1) :]:
        packed, size = scan(path), path.stat().st_size
        steps = tuple(sorted({frame.step for frame in packed.frames if frame.step > last}))
        counted = max((frame.step for frame in packed.frames if frame.step <= last), default=-1)
        # Damage after the last counted step, or in a file that holds only later steps, is the result of a power failure.
        is_late = counted == last or first_step(path) > last
        torn = size > packed.end and (packed.fault is None or is_late)
        if not steps and not torn:
            continue
        data = path.read_bytes()
        cut = min((frame.start for frame in packed.frames if frame.step > last), default=packed.end)
        behind = [frame for frame in packed.frames if frame.start >= cut]
        before = data[:cut] + b"".join(data[f.start : f.end] for f in behind if f.step <= last)
        after = b"".join(data[frame.start : frame.end] for frame in behind if frame.step > last)
        name = f"{steps[0]:08d}{PACKED}" if steps else path.name
        later.append(LaterRows(path, name, steps, before, after) if before else LaterRows(path, name, steps))
    return later


def cut_steps(folder: Path, last: int) -> None:
    """Remove the steps after `last` and incomplete rows. If the process is killed, some of them may remain."""
    for later in later_parts(folder, last):
        if later.before is None:
            later.file.unlink()
        else:
            replace_file(later.file, later.before)


def forgettable(folder: Path, before: int) -> dict[Path, int]:
    """Return the files that hold only steps smaller than `before`, each with its last step."""
    found = {}
    for path in packed_files(folder):
        last = max(scan(path).steps, default=before) if first_step(path) < before else before
        if last < before:
            found[path] = last
    return found
