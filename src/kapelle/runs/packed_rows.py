"""Rows of JSON lines by step in one compressed file, which grows by whole frames; `step_rows` finds the files.

A file is a row of frames of Zstandard (RFC 8878): a *skippable* frame that describes the next one, then the next one,
which holds complete lines. `zstd -dc FILE` therefore prints all lines. The description is, in little-endian order:

    tag "kpl1" · step u64 · first row u32 · rows u32 · rows of the whole step u32 · bytes unpacked u32 · bytes packed u32 ·
    CRC-32 of the packed bytes u32 · CRC-32 of this description u32

Descriptions are the index: they say where each frame is without unpacking anything. A step is there when all of its rows
are. A process that was killed leaves at worst a step without its last rows or half a frame, which readers pass over.
Damage is passed over too, up to the next description, and reported in `Packed.fault`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from kapelle.errors import DataError
from kapelle.runtime.files import check_plain

FRAME = 1 << 20
"""Bytes of lines after which a frame ends."""
LARGEST = 256 << 20
"""Bytes of the largest frame that is unpacked, which holds one row: a larger one is no frame of ours but a bomb."""
LAST_STEP = 10**12
"""Steps end before this one: names of files have room for twelve digits."""
LEVEL = 6
"""Of compression; ADR 0056 has the measurements."""
_SKIPPABLE = struct.Struct("<II")
_MAGIC = 0x184D2A5E
_ABOUT = struct.Struct("<4sQIIIIII")
_CHECK = struct.Struct("<I")
_TAG = b"kpl1"
_SEARCHES = 100
"""Places of damage after which the rest of a file is given up."""
_HEAD = _SKIPPABLE.size + _ABOUT.size + _CHECK.size
_BEGIN = _SKIPPABLE.pack(_MAGIC, _ABOUT.size + _CHECK.size) + _TAG


@dataclass(frozen=True, slots=True)
class Frame:
    """Some rows of a step, and where they are."""

    step: int
    first: int
    """Number of its first row in the step, from 0."""
    rows: int
    total: int
    """Rows of the whole step."""
    unpacked: int
    """Bytes of the lines."""
    packed: int
    """Bytes in the file, without the description."""
    crc: int
    """CRC-32 of the packed bytes."""
    offset: int
    """Where the packed bytes begin in the file."""

    @property
    def start(self) -> int:
        """Where the description begins."""
        return self.offset - _HEAD

    @property
    def end(self) -> int:
        """Where the next frame begins."""
        return self.offset + self.packed


@dataclass(frozen=True, slots=True)
class Packed:
    """What a file holds, as its descriptions have it."""

    frames: tuple[Frame, ...]
    """In the order of the file."""
    steps: dict[int, tuple[Frame, ...]]
    """The frames of every step that is there whole."""
    fault: str | None
    """Where the file is damaged; None where it is whole, or ends in what was being written."""

    @property
    def end(self) -> int:
        """Where the last frame ends."""
        return self.frames[-1].end if self.frames else 0


def pack(step: int, lines: Sequence[bytes]) -> bytes:
    """Return the frames of a step's lines, each of which ends in a newline; DataError where one is too large to be read back."""
    import zstandard

    compressor = zstandard.ZstdCompressor(level=LEVEL)
    content = []
    for first, part in _parts(lines):
        raw = b"".join(part)
        if len(raw) > LARGEST:
            raise DataError(f"A row of step {step} has {len(raw)} bytes; at most {LARGEST} can be kept.")
        packed = compressor.compress(raw)
        about = _ABOUT.pack(
            _TAG, step, first, len(part), len(lines), len(raw), len(packed), zlib.crc32(packed)
        )
        head = _SKIPPABLE.pack(_MAGIC, _ABOUT.size + _CHECK.size)
        content.append(head + about + _CHECK.pack(zlib.crc32(about)) + packed)
    return b"".join(content)


def _parts(lines: Sequence[bytes]) -> Iterator[tuple[int, Sequence[bytes]]]:
    """Yield runs of lines of about `FRAME` bytes, each with the number of its first line; one empty run for no lines."""
    start = size = 0
    for k, line in enumerate(lines):
        if k > start and size + len(line) > FRAME:
            yield start, lines[start:k]
            start, size = k, 0
        size += len(line)
    yield start, lines[start:]


def known_scan(path: Path) -> Packed:
    """Return what `scan` does, remembered for as long as the file stays as it is."""
    about = path.stat()
    mark = about.st_ino, about.st_size, about.st_mtime_ns
    latest = _latest(path)
    for seen, packed in tuple(latest):
        if seen == mark:
            return packed
    packed = scan(path)
    latest[:] = [(mark, packed)]
    return packed


@lru_cache(maxsize=4096)
def _latest(_path: Path) -> list[tuple[tuple[int, int, int], Packed]]:
    """Return where the latest scan of a file is remembered, with what the file was like."""
    return []


def scan(path: Path) -> Packed:
    """Return what a file holds; OSError where it cannot be read. Only its descriptions are read."""
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
                at = _next(file, at + 1, size)
                continue
            if frame.end > size:
                break
            found.setdefault(frame.step, []).append(frame)
            at = frame.end
    frames = tuple(sorted((frame for own in found.values() for frame in own), key=lambda frame: frame.offset))
    steps = {step: whole for step, own in found.items() if (whole := _whole(own))}
    return Packed(frames, steps, fault)


def frames_of(data: bytes) -> list[Frame]:
    """Return the frames that `pack` has put into these bytes."""
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


def _next(file: BinaryIO, start: int, size: int) -> int:
    """Return where the next description may begin, the end of the file where none does."""
    while start < size:
        file.seek(start)
        found = file.read(FRAME).find(_BEGIN)
        if found >= 0:
            return start + found
        start += FRAME - len(_BEGIN) + 1
    return size


def _whole(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the frames of a step in order if all of its rows are there, else nothing."""
    # Frames that are there twice, by damage to the file, count once.
    ordered = sorted({frame.first: frame for frame in frames}.values(), key=lambda frame: frame.first)
    row = 0
    for frame in ordered:
        if frame.first != row or frame.total != ordered[0].total:
            return ()
        row += frame.rows
    return tuple(ordered) if row == ordered[0].total else ()


def unpack(path: Path, frame: Frame) -> list[bytes]:
    """Return the lines of a frame, without their newlines; DataError where they are damaged, OSError where they cannot be read."""
    import zstandard

    with path.open("rb") as file:
        file.seek(frame.offset)
        packed = file.read(min(frame.packed, LARGEST))
    wrong = None
    raw = b""
    if len(packed) != frame.packed or zlib.crc32(packed) != frame.crc:
        wrong = "its content has changed"
    elif frame.unpacked > (LARGEST if frame.rows == 1 else FRAME):
        wrong = f"they would unpack to {frame.unpacked} bytes"
    else:
        try:
            if zstandard.get_frame_parameters(packed).content_size != frame.unpacked:
                wrong = "it does not hold what its description says"
            else:
                raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=frame.unpacked)
        except (zstandard.ZstdError, ValueError, MemoryError) as error:
            wrong = str(error)
    lines = raw.split(b"\n")
    if wrong is None and (lines.pop() or len(lines) != frame.rows):
        wrong = "it does not hold what its description says"
    if wrong is not None:
        last = frame.first + frame.rows - 1
        raise DataError(
            f"{path} is damaged: rows {frame.first} to {last} of step {frame.step} cannot be unpacked: {wrong}. "
            "Restore it from a copy."
        )
    return lines
