"""Errors of the machine in words: files, memory, threads, descriptors.

Code that knows what was being read or written reports it itself. This covers errors that reach the command line all
the same, so that no fault of the machine ends in a traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

_REASONS: Mapping[int, str] = {
    errno.EIO: "the disk reports a fault (EIO). Check the disk, then try again, or go on elsewhere from a copy.",
    errno.ENOSPC: "the disk is full. Free some space, then go on with --resume; what was saved before is intact.",
    errno.EDQUOT: "the disk quota is used up. Free some space, then go on with --resume; what was saved is intact.",
    errno.EROFS: "the file system is read-only. Name a folder that can be written.",
    errno.EACCES: "permission denied. Let this user read and write it, or name another place.",
    errno.EPERM: "permission denied. Let this user read and write it, or name another place.",
    errno.EISDIR: "it is a folder, and a file is needed. Move it away, or name a file.",
    errno.ENOTDIR: "a part of the path is a file, not a folder. Move that away, or name another path.",
    errno.ENOENT: "it is not there. Put it back, or name another path.",
    errno.EMFILE: "this process may open no more files. Raise the limit (`ulimit -n 65536`), or play fewer episodes at a "
    "time (`training.tasks_per_step`).",
    errno.ENFILE: "this machine may open no more files. End other programs, or raise the limit `fs.file-max`.",
    errno.ENOMEM: "there is no memory left. End other programs, or use a smaller model or batch.",
    errno.EAGAIN: "this user may start no more processes or threads. Raise the limit (`ulimit -u`), or end other "
    "programs.",
}
_NO_THREAD = "can't start new thread"
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "could not create a primitive")
"""The last is oneDNN's, which multiplies matrices for torch and says no more."""
_UNSAID = "error return without exception set"


def refusal(error: BaseException) -> str | None:
    """Return what the machine refused and what to do about it; None for an error that is not the machine's."""
    if isinstance(error, OSError) and error.errno is not None:
        reason = _REASONS.get(error.errno) or f"{error.strerror or error}. Check the path and the disk."
        return f"Cannot use {error.filename}: {reason}" if error.filename else _capital(reason)
    if isinstance(error, MemoryError):
        return _capital(_REASONS[errno.ENOMEM])
    if isinstance(error, SystemError) and _UNSAID in str(error):
        return f"A library failed and did not say why, as without memory. Perhaps {_REASONS[errno.ENOMEM]}"
    if isinstance(error, RuntimeError):
        text = str(error).lower()
        if _NO_THREAD in text:
            return _capital(_REASONS[errno.EAGAIN])
        if any(sign in text for sign in _NO_MEMORY):
            return _capital(_REASONS[errno.ENOMEM])
    return None


def _capital(reason: str) -> str:
    return f"{reason[0].upper()}{reason[1:]}"
