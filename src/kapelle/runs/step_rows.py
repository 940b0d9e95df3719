"""Rows of JSON by step in a folder of a run, compressed: how episodes and traces are written, found, read and cut.

    00000012.jsonl         the rows of step 12, one per line, as older versions wrote them
    00000012.jsonl.zst     the rows of several steps from 12 on, compressed; see below

    for step, stored in stored_steps(run / "episodes" / "train").items():
        for line in lines_of(stored):
            ...

A step that is there in both forms is read from its own file. Only the places of frames are cached.
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
from itertools import islice
from pathlib import Path

from kapelle.errors import DataError, RunDirectoryError
from kapelle.runtime.files import check_plain, replace_file, write_all

# -------- One compressed file, which grows by whole frames.
#
# A file is a row of frames of Zstandard (RFC 8878): a *skippable* frame that describes the next one, then the next one,
# which holds complete lines. `zstd -dc FILE` therefore prints all lines. The description is, in little-endian order:
#
#     tag "kpl1" · step u64 · first row u32 · rows u32 · rows of the whole step u32 · bytes unpacked u32 · bytes packed u32 ·
#     CRC-32 of the packed bytes u32 · CRC-32 of this description u32
#
# Descriptions are the index: they say where each frame is without unpacking anything. A step is there when all of its rows
# are. A process that was killed leaves at worst a step without its last rows or half a frame, which readers skip.
# Damage is skipped too, up to the next description, and reported in `Packed.fault`.

FRAME = 1 << 20
"""Bytes of lines after which a frame ends."""
LARGEST = 256 << 20
"""Bytes of the largest frame that is unpacked, which holds one row: a larger one is not ours but a decompression bomb."""
LAST_STEP = 10**12
"""Steps end before this one: names of files have room for twelve digits."""
LEVEL = 6
"""Of compression."""
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
    """What a file holds, according to its descriptions."""

    frames: tuple[Frame, ...]
    """In the order of the file."""
    steps: dict[int, tuple[Frame, ...]]
    """The frames of every step that is complete."""
    fault: str | None
    """Where the file is damaged; None if it is whole, or ends in rows that were being written."""

    @property
    def end(self) -> int:
        """Where the last frame ends."""
        return self.frames[-1].end if self.frames else 0


def pack(step: int, lines: Sequence[bytes]) -> bytes:
    """Return the frames of a step's lines, each of which ends in a newline; DataError where one is too large to be read back."""
    import zstandard

    compressor = zstandard.ZstdCompressor(level=LEVEL)
    content = []
    # A frame has about `FRAME` bytes of lines; no lines are one empty frame.
    begins, size = [0], 0
    for k, line in enumerate(lines):
        if k > begins[-1] and size + len(line) > FRAME:
            begins.append(k)
            size = 0
        size += len(line)
    for first, end in zip(begins, [*begins[1:], len(lines)], strict=True):
        part = lines[first:end]
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


def known_scan(path: Path) -> Packed:
    """Return the cached value of `scan`; scans again when the file has changed."""
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
    """Return the cache of a file's latest scan: one entry, with the file's inode, size and time then."""
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
                # To where the next description may begin.
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


def _whole(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the frames of a step in order if all of its rows are there, else nothing."""
    # A damaged file may hold a frame twice; it counts once.
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
        """Bytes of its rows, uncompressed, as the descriptions have it. OSError where the file is gone."""
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
    """Return for every step two numbers that change with its rows, for caches; reads the folder once, in no order."""
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
            for step, frames in known_scan(folder / name).steps.items():
                mixed = 0
                for frame in frames:
                    mixed = (mixed * 31 + frame.crc) % 2**61
                found[step] = sum(frame.packed for frame in frames), mixed
    return found | plain


def last_step(folder: Path) -> int:
    """Return the last step whose rows are complete, -1 for none; not cached. RunDirectoryError where that cannot be read."""
    with reading(folder):
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
    with reading(folder):
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
    with reading(folder):
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
    with reading(stored.file):
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
    with reading(path):
        return scan(path)


@contextmanager
def reading(path: Path, *, missing: bool = False) -> Iterator[None]:
    """Turn what the disk refuses inside the block into a RunDirectoryError; with `missing`, FileNotFoundError passes."""
    try:
        yield
    except OSError as error:
        if missing and isinstance(error, FileNotFoundError):
            raise
        raise RunDirectoryError(
            f"Cannot read {path}: {error.strerror}. Is it a run directory that this user may read, on a disk without faults?"
        ) from error


# -------- Writing steps, and taking them away again.
#
# A step is appended to the newest file with one write. A file that holds `STEPS` steps or `SIZE` bytes is complete, and the next
# step begins another one, which is named after it: the same steps make the same files, however often a run was killed
# and continued. No function here catches OSError.

STEPS = 16
SIZE = 16 << 20


@dataclass(frozen=True, slots=True)
class LaterRows:
    """The rows in a file that belong to steps after a given one."""

    file: Path
    name: str
    """Name of a file of the same form with these steps alone."""
    steps: tuple[int, ...]
    before: bytes | None = None
    """Content that stays in the file; None if none does."""
    after: bytes = b""
    """Content that the file loses, if some stays."""


def append_step(folder: Path, step: int, content: bytes) -> tuple[Path, bytes]:
    """Append the lines of a step, once; return the file and the bytes that were appended. Flushes nothing to the disk."""
    assert not plain_file(folder, step).exists(), f"step {step} is recorded once"
    data = pack(step, content.splitlines(keepends=True))
    newest = next(reversed(packed_files(folder)), None)
    if newest is not None:
        packed, size = scan(newest), newest.stat().st_size
        assert step not in packed.steps, f"step {step} is recorded once"
        if len(packed.steps) < STEPS and packed.end == size < SIZE:
            descriptor = os.open(newest, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            try:
                about = os.fstat(descriptor)
                if about.st_nlink > 1:  # a copy by hard links shares the file
                    replace_file(newest, newest.read_bytes() + data, sync=False)
                    return newest, data
                try:
                    write_all(descriptor, data)
                except OSError:
                    with suppress(OSError):  # a full disk may have taken a part
                        os.ftruncate(descriptor, about.st_size)
                    raise
            finally:
                os.close(descriptor)
            return newest, data
    begun = folder / f"{step:08d}{PACKED}"
    replace_file(begun, data, sync=False)
    return begun, data


def later_parts(folder: Path, last: int) -> list[LaterRows]:
    """Return what the files of a folder hold of the steps after `last`, half-written ones included."""
    later = [LaterRows(path, path.name, (step,)) for step, path in plain_files(folder) if step > last]
    files = packed_files(folder)
    begun = sum(first_step(path) <= last for path in files)
    # Steps are recorded in order, so that a file before the last one that begins in time holds none that came later.
    for path in files[max(0, begun - 1) :]:
        packed, size = scan(path), path.stat().st_size
        steps = tuple(sorted({frame.step for frame in packed.frames if frame.step > last}))
        counted = max((frame.step for frame in packed.frames if frame.step <= last), default=-1)
        # Damage behind the last counted step, or in a file that begins there, is what a loss of power has left of later steps.
        late = counted == last or first_step(path) > last
        torn = size > packed.end and (packed.fault is None or late)
        if not steps and not torn:
            continue
        data = path.read_bytes()
        cut_steps = min((frame.start for frame in packed.frames if frame.step > last), default=packed.end)
        behind = [frame for frame in packed.frames if frame.start >= cut_steps]
        before = data[:cut_steps] + b"".join(data[f.start : f.end] for f in behind if f.step <= last)
        after = b"".join(data[frame.start : frame.end] for frame in behind if frame.step > last)
        name = f"{steps[0]:08d}{PACKED}" if steps else path.name
        later.append(LaterRows(path, name, steps, before, after) if before else LaterRows(path, name, steps))
    return later


def cut_steps(folder: Path, last: int) -> None:
    """Remove the steps after `last`, and half-written rows; a kill in between leaves some of them."""
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
