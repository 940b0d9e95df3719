"""Functions for the machine: clear messages for its errors, limits of file descriptors, memory for threads and installed versions.

Code that knows which file it reads or writes reports errors itself. For all other errors, the command line uses `refusal`, so that a
problem of the machine is shown as a message instead of a traceback.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

REASONS: Mapping[int, str] = {
    errno.EIO: "the disk reports a fault (EIO). Check the disk, then try again, or continue elsewhere from a copy.",
    errno.ENOSPC: "the disk is full. Free some space, then continue with --resume: earlier files are intact.",
    errno.EDQUOT: "the disk quota is used up. Free some space, then continue with --resume: earlier files are intact.",
    errno.EROFS: "the file system is read-only. Choose a writable folder.",
    errno.EACCES: "permission denied. Give this user read and write permission, or choose another path.",
    errno.EPERM: "permission denied. Give this user read and write permission, or choose another path.",
    errno.EISDIR: "it is a folder instead of a file. Move it away, or choose a file.",
    errno.ENOTDIR: "a part of the path is a file, not a folder. Move that file away, or choose another path.",
    errno.EEXIST: "a file has the name of this folder. Choose another folder.",
    errno.EFBIG: "the file would exceed the size limit of this process or disk. Free some space, then continue with --resume.",
    errno.ENOENT: "it does not exist. Restore it, or choose another path.",
    errno.EMFILE: "this process cannot open more files. Raise the limit (`ulimit -n 65536`), or lower "
    "`training.tasks_per_step`.",
    errno.ENFILE: "this machine cannot open more files. End other programs, or raise the limit `fs.file-max`.",
    errno.ENOMEM: "there is no memory left. End other programs, or use a smaller model or batch.",
    errno.EAGAIN: "this user cannot start more processes or threads. Raise the limit (`ulimit -u`), or end other "
    "programs.",
}
_NO_THREAD = "can't start new thread"
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "could not create a primitive")
"""Parts of messages that indicate a lack of memory. The last one comes from oneDNN, which torch uses to multiply matrices."""
_UNSAID = "error return without exception set"


def refusal(error: BaseException) -> str | None:
    """Return a message about a problem of the machine and how to fix it, or None for other errors."""
    if isinstance(error, OSError) and error.errno is not None:
        reason = REASONS.get(error.errno) or f"{error.strerror or error}. Check the path and the disk."
        return f"Cannot use {error.filename}: {reason}" if error.filename else _capital(reason)
    if isinstance(error, MemoryError):
        return _capital(REASONS[errno.ENOMEM])
    if isinstance(error, SystemError) and _UNSAID in str(error):
        return f"A library failed without giving a reason. Perhaps {REASONS[errno.ENOMEM]}"
    if isinstance(error, RuntimeError):
        text = str(error).lower()
        if _NO_THREAD in text:
            return _capital(REASONS[errno.EAGAIN])
        if any(sign in text for sign in _NO_MEMORY):
            return _capital(REASONS[errno.ENOMEM])
    return None


def _capital(reason: str) -> str:
    return f"{reason[0].upper()}{reason[1:]}"


# -------- Descriptors: the system limits how many a process has open, often to 1,024. Connections and pipes are descriptors. Work that
# needs more of them waits in a queue.

try:
    import resource

    HAS_LIMITS = True
except ModuleNotFoundError:  # Windows
    HAS_LIMITS = False

DESCRIPTORS_WANTED = 65_536
"""The soft limit of file descriptors is raised to this number if the hard limit allows it."""
_WITHOUT_LIMITS = 2048
"""Number of file descriptors that is assumed on Windows, which limits files instead of descriptors."""
_SPARE = 256
"""Number of file descriptors that are reserved for files, but at most a quarter of the limit."""


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of file descriptors as far as possible, up to `DESCRIPTORS_WANTED`, and return the limit."""
    if not HAS_LIMITS:
        return _WITHOUT_LIMITS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_WANTED)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return DESCRIPTORS_WANTED if soft == resource.RLIM_INFINITY else soft
    with suppress(ValueError, OSError):  # some systems have a lower bound than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def most_open(each: int, most: int) -> int:
    """Return how many additional items, each with `each` file descriptors, can be open at the same time.

    The result is between 1 and `most`.
    """
    if each < 1:
        return most
    limit = raise_descriptor_limit()
    try:
        in_use = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (only the names are needed)
    except OSError:
        in_use = 64
    left = limit - in_use - min(_SPARE, limit // 4)
    return max(1, min(most, left // each))


# -------- Threads without memory to start
#
# `Thread.start` waits until the new thread runs. A thread without memory for its first lines never reports that, so the starting code
# would wait forever (CPython, gh-140746). A command ends with a message instead.

THREAD_START_S = 20.0
"""Time in seconds after which a thread that has not started will never start, even on a busy machine."""
EXIT_WITHOUT_MEMORY = 2
_STARTED_BY = "thread started by"
"""Part of Python's message for an error that occurs before the thread's own code runs."""
_NO_MEMORY_LEFT = (
    b"kapelle: There is no memory left to start a thread. End other programs, raise the limit of memory (`ulimit -v`), "
    b"or use a smaller model or batch, then continue with --resume.\n"
)  # made early, because later there is no memory for it


run_logs: list[int] = []
"""File descriptors of the log files of this process's runs, to which a process that ends immediately writes its last message."""


def log_last(message: bytes) -> None:
    """Write the last line of this process to the log files of its runs, without allocating memory."""
    for descriptor in run_logs:
        with suppress(OSError):
            os.write(descriptor, message)


@contextmanager
def end_without_memory() -> Iterator[None]:
    """End the process with a message if there is not enough memory to start a thread in the block."""
    before = sys.unraisablehook

    def hook(raised: sys.UnraisableHookArgs) -> None:
        if issubclass(raised.exc_type, MemoryError) and _STARTED_BY in (raised.err_msg or ""):
            exit_without_memory()
        before(raised)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def exit_without_memory() -> NoReturn:
    """End the process with a message, without allocating memory."""
    with suppress(OSError):
        os.write(2, _NO_MEMORY_LEFT)
    log_last(_NO_MEMORY_LEFT)
    os._exit(EXIT_WITHOUT_MEMORY)


class ThreadStarts:
    """The threads of this process that have not yet started completely."""

    def __init__(self) -> None:
        self._waited: dict[threading.Thread, float] = {}

    def lost(self, passed: float) -> bool:
        """Return whether a thread has been waiting for its start for longer than `THREAD_START_S`.

        The argument `passed` is the time in seconds since the last call.
        """
        waiting = [thread for thread in threading.enumerate() if not thread.is_alive()]
        self._waited = {thread: self._waited.get(thread, 0.0) + passed for thread in waiting}
        return any(waited > THREAD_START_S for waited in self._waited.values())


def versions_of(packages: Sequence[str]) -> dict[str, str | None]:
    """Return the versions of Python and of each package by name. The version of a missing package is None."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


@contextmanager
def long_lived_apart() -> Iterator[None]:
    """Exclude all existing objects from garbage collection while the block runs.

    Libraries and models consist of several hundred thousand objects. A step creates many small objects, and each full collection
    would visit all existing objects, which takes a fifth of the time of a step with tiny models. This context manager has no effect
    if the caller has already frozen objects.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()  # otherwise current garbage would stay
    gc.freeze()
    # An unfinished generator may end at exit, after `gc` has lost its names.
    unfreeze = gc.unfreeze
    try:
        yield
    finally:
        unfreeze()
