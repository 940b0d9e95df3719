"""Contents of files: plain ones alone, hashed while they are read, so that hashes match what was read; and unpacked."""

from __future__ import annotations

import errno
import hashlib
import io
import stat
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

BUFFER = 1 << 20
HASHED_WHOLE = 256 << 20
"""Bytes of a folder up to which every file is hashed; of a larger one, names, sizes and times of change."""


def check_plain(file: Path, mode: int) -> None:
    """Raise OSError unless this mode, as `stat` has it, is a plain file's: a pipe or device could wait or go on for ever."""
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no plain file", str(file))


def plain_bytes(file: Path) -> bytes:
    """Return what a plain file holds; OSError for anything else."""
    check_plain(file, file.stat().st_mode)
    return file.read_bytes()


@contextmanager
def hashed(file: Path, contents: MutableMapping[str, str] | None) -> Iterator[BinaryIO]:
    """Open a file to read it, and put its hash into `contents` once it was read without an error; lets OSError through.

    What the reader left unread is read for that.
    """
    with file.open("rb", buffering=0) as raw:
        watched = _Watched(cast("io.RawIOBase", raw))
        buffered = cast("BinaryIO", io.BufferedReader(cast("io.RawIOBase", watched), BUFFER))
        yield buffered
        if contents is not None:
            while buffered.read(BUFFER):
                pass
            contents[str(file)] = watched.digest.hexdigest()


def content_of(file: Path) -> str:
    """Return the hash of a file's content; lets OSError through."""
    found: dict[str, str] = {}
    with hashed(file, found):
        pass
    return found[str(file)]


def folder_content(folder: Path, chosen: Callable[[Path], bool] = lambda _: True) -> str:
    """Return one hash of the files beneath a folder: their names and contents; of a large folder, see `HASHED_WHOLE`.

    Files that cannot be read count as such.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and chosen(path))
    sizes = {path: _size_and_time(path) for path in files}
    whole = sum(size for size, _ in sizes.values()) <= HASHED_WHOLE
    digest = hashlib.sha256()
    for path, (size, time_ns) in sizes.items():
        content = content_or_fault(path) if whole else f"{size} {time_ns}"
        digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\0".encode(errors="surrogateescape"))
    return digest.hexdigest() if whole else f"by size and time {digest.hexdigest()}"


def content_or_fault(path: Path) -> str:
    """Return the hash of a file's content, or why it cannot be read."""
    try:
        return content_of(path)
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


class _Watched(io.RawIOBase):
    """A file whose bytes are hashed as they go by."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]  # any writable buffer
        count = self._raw.readinto(buffer) or 0
        self.digest.update(memoryview(buffer)[:count])
        return count


def unpacked(file: BinaryIO) -> BinaryIO:
    """Return the content of a file of Zstandard frames (RFC 8878), skippable ones passed over; EOFError where it is cut short."""
    import zstandard

    parts: list[bytes] = []
    frame, open_frame = zstandard.ZstdDecompressor().decompressobj(), False
    while chunk := file.read(BUFFER):
        while chunk:
            try:
                parts.append(frame.decompress(chunk))
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from None
            chunk, open_frame = frame.unused_data if frame.eof else b"", not frame.eof
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
    if open_frame:
        raise EOFError("the last frame has no end")
    return io.BytesIO(b"".join(parts))
