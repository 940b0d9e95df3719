"""Writes that survive a crash: to a temporary file, flushed to the disk, then renamed.

A reader sees the old file or the new one, never half of either. No function that writes catches OSError: the caller
knows what was being saved and turns it into an error of ours with `writing`, or with `explain` into another.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kapelle.errors import RunDirectoryError

PARTIAL = ".partial"
"""Suffix of files being written; any that remain are leftovers of a crash and may be deleted."""

_FULL = "Free some space; what was saved before is intact, continue from it with --resume."
_REASONS = {
    errno.ENOSPC: f"the disk is full. {_FULL}",
    errno.EDQUOT: f"the disk quota is used up. {_FULL}",
    errno.EFBIG: f"the file would exceed the size limit of this process or disk. {_FULL}",
    errno.EROFS: "the file system is read-only. Choose a --run-dir on a disk that can be written.",
    errno.EACCES: "permission denied. Choose a --run-dir that this user may write.",
    errno.EPERM: "permission denied. Choose a --run-dir that this user may write.",
    errno.EIO: "the disk reports a fault (EIO). Check the disk, then continue elsewhere from a copy.",
    errno.EEXIST: "a file stands where a folder should be. Choose another --run-dir.",
    errno.ENOTDIR: "a part of the path is a file, not a folder. Choose another --run-dir.",
}


def explain(error: OSError) -> str:
    """Return the reason of a failed write in words, with what to do about it."""
    known = _REASONS.get(error.errno or 0)
    return known or f"{error.strerror or error}. Check the disk and the path."


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses inside the block into a RunDirectoryError; `path` where the fault names no file."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"Cannot write {error.filename or path}: {explain(error)}") from error


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte, also where the system takes them in several pieces."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_new(path: Path, data: bytes) -> None:
    """Write a file that did not exist and flush it to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Put `data` in the place of a file in one step; `sync=False` leaves flushing to the caller.

    Without flushing the change still survives the death of the process, but not of the machine.
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
    """Create a missing file, and give one that is shared by hard links (`cp -al`) a copy of its own."""
    with path.open("ab") as file:
        shared = os.fstat(file.fileno()).st_nlink > 1
    if shared:
        replace_file(path, path.read_bytes())


def flush(path: Path) -> None:
    """Flush a file or the entries of a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
