"""Write files so that a crash never leaves a partial file, and read files together with their hash.

A new file is written under a temporary name, flushed to disk and then renamed, so that a reader sees either the old file or the new
file. Functions that write files do not catch OSError. The caller knows what it saves, and converts the error to an error of kapelle
with `writing` or `explain`.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import stat
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from kapelle.errors import RunDirectoryError
from kapelle.runtime.machine import REASONS

PARTIAL = ".partial"
"""Suffix of files that are being written. Files with this suffix that remain after a crash can be deleted."""


def cache_folder() -> Path:
    """Return the path of the cache folder: `$KAPELLE_CACHE`, or `~/.cache/kapelle` if this variable is not set."""
    named = os.environ.get("KAPELLE_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "kapelle"


def explain(error: OSError) -> str:
    """Return the reason why writing failed, and how to fix the problem."""
    return REASONS.get(error.errno or 0) or f"{error.strerror or error}. Check the disk and the path."


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError in the block to a RunDirectoryError.

    If the error does not contain a file name, the message contains `path`.
    """
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"Cannot write {error.filename or path}: {explain(error)}") from error


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes to a file descriptor, in several pieces if necessary."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_new(path: Path, data: bytes) -> None:
    """Write a new file and flush it to disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace the content of a file in one step. With `sync=False`, the caller must flush the file.

    A change that is not flushed survives a crash of the process, but not a crash of the machine.
    """
    beside = path.with_name(f".{path.name}{PARTIAL}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(descriptor, data)
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    beside.replace(path)
    if sync:
        flush(path.parent)


def own_file(path: Path) -> None:
    """Create the file if it is missing. If the file is shared by hard links (`cp -al`), replace it by a copy."""
    with path.open("ab") as file:
        shared = os.fstat(file.fileno()).st_nlink > 1
    if shared:
        replace_file(path, path.read_bytes())


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -------- Reading: only regular files, hashed while they are read, so that the hash belongs to the bytes that were read.

BUFFER = 1 << 20
HASHED_WHOLE = 256 << 20
"""Maximum total size in bytes of a folder whose files are hashed. For larger folders, only names, sizes and modification times are
hashed."""


def check_plain(file: Path, mode: int) -> None:
    """Raise OSError unless a `stat` mode is the mode of a regular file. Reading a pipe or a device might never end."""
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))


def plain_bytes(file: Path) -> bytes:
    """Return the content of a regular file. Raises OSError if it is not a regular file."""
    check_plain(file, file.stat().st_mode)
    return file.read_bytes()


@contextmanager
def hashed(file: Path, contents: MutableMapping[str, str] | None) -> Iterator[BinaryIO]:
    """Open a file for reading, and add its hash to `contents` if the block ends without an error.

    At the end of the block, the rest of the file is read to compute the hash. An OSError is not caught.
    """
    with file.open("rb", buffering=0) as raw:
        watched = _Watched(cast("io.RawIOBase", raw))
        buffered = cast("BinaryIO", io.BufferedReader(cast("io.RawIOBase", watched), BUFFER))
        yield buffered
        if contents is not None:
            while buffered.read(BUFFER):
                pass
            contents[str(file)] = watched.digest.hexdigest()


def folder_content(folder: Path, chosen: Callable[[Path], bool] = lambda _: True) -> str:
    """Return one hash of the names and contents of all files of a folder. For large folders, see `HASHED_WHOLE`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and chosen(path))
    sizes = dict.fromkeys(files, (0, 0))
    for path in files:
        with suppress(OSError):
            found = path.stat()
            sizes[path] = found.st_size, found.st_mtime_ns
    whole = sum(size for size, _ in sizes.values()) <= HASHED_WHOLE
    digest = hashlib.sha256()
    for path, (size, time_ns) in sizes.items():
        content = content_or_fault(path) if whole else f"{size} {time_ns}"
        digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\0".encode(errors="surrogateescape"))
    return digest.hexdigest() if whole else f"by size and time {digest.hexdigest()}"


def content_or_fault(path: Path) -> str:
    """Return the hash of the content of a file, or the reason why the file cannot be read."""
    try:
        return sha256(path)
    except OSError as error:
        return f"unreadable: {error.strerror}"


class _Watched(io.RawIOBase):
    """A file that computes the hash of all bytes that are read from it."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]  # any writable buffer
        count = self._raw.readinto(buffer) or 0
        self.digest.update(memoryview(buffer)[:count])
        return count


def decompressed(file: BinaryIO) -> BinaryIO:
    """Return the decompressed content of a file of Zstandard frames (RFC 8878), without skippable frames.

    Raises EOFError if the file is truncated.
    """
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
        raise EOFError("the last frame is incomplete")
    return io.BytesIO(b"".join(parts))


# -------- Manifests: lists of files with their sizes and hashes, for checkpoints and weights.

FOLDER = re.compile(r"(\d{8,})(?:-(\d+))?")
"""Regular expression of the name of a checkpoint's folder, which contains the step and a number if the step has several checkpoints."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def step_of(folder: Path) -> int | None:
    """Return the step number in the name of a checkpoint, or None if the name is not that of a checkpoint."""
    match = FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def sha256(path: Path) -> str:
    """Return the SHA-256 hash of the content of a file in hexadecimal digits. An OSError is not caught."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the key-value pairs of a JSON object as a dict. Raises ValueError if a key is repeated."""
    # A damaged name that equals another one would otherwise hide a file from the check.
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is repeated")
    return dict(pairs)


def check_listed(files: dict[str, Any]) -> None:
    """Raise ValueError or TypeError unless a size and a SHA-256 hash are listed for every file."""
    for expected in files.values():
        if expected.keys() != {"bytes", "sha256"} or type(expected["bytes"]) is not int:
            raise ValueError("a file's entry has another form")
        if not _SHA256.fullmatch(expected["sha256"]):
            raise ValueError("no SHA-256")
