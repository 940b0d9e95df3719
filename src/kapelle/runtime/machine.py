"""What the machine gives and refuses: its errors in words, descriptors, memory for threads, installed versions.

Code that knows what was being read or written reports an error itself. `refusal` covers errors that reach the command
line all the same, so that a fault of the machine ends in a sentence and not in a traceback.
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


# -------- Descriptors: the system bounds how many a process has open, most often at 1,024. Connections, and the pipes to
# programs, are descriptors. Work that would need more than there are queues instead of failing.

try:
    import resource

    HAS_LIMITS = True
except ModuleNotFoundError:  # Windows
    HAS_LIMITS = False

DESCRIPTORS_WANTED = 65_536
"""The soft limit is raised to this number, where the hard limit allows it."""
_WITHOUT_LIMITS = 2048
"""Assumed on Windows, which bounds files and not descriptors."""
_SPARE = 256
"""Left for files and for what is open for a moment only; of a small limit a quarter."""


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of descriptors as far as it goes, up to `DESCRIPTORS_WANTED`, and return it."""
    if not HAS_LIMITS:
        return _WITHOUT_LIMITS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_WANTED)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return DESCRIPTORS_WANTED if soft == resource.RLIM_INFINITY else soft
    with suppress(ValueError, OSError):  # some systems have a bound of their own below the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def most_open(each: int, most: int) -> int:
    """Return how many things with `each` descriptors may be open at once beside what is open now: 1 to `most`."""
    if each < 1:
        return most
    limit = raise_descriptor_limit()
    try:
        in_use = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (a list of names is all that is asked)
    except OSError:
        in_use = 64
    left = limit - in_use - min(_SPARE, limit // 4)
    return max(1, min(most, left // each))


# -------- Threads that end before they begin, for want of memory.
#
# `Thread.start` waits until the new thread says that it runs, and a thread that finds no memory for its first lines says
# nothing: the code that started it, a library too, would wait for ever (CPython, gh-140746). A command ends in one line instead.

THREAD_START_S = 20.0
"""Seconds after which a thread that has not begun never will, however busy the machine is."""
EXIT_WITHOUT_MEMORY = 2
_STARTED_BY = "thread started by"
"""What Python says of an error that no line of the thread's own could catch."""
_NO_MEMORY_LEFT = (
    b"kapelle: There is no memory left to start a thread with. End other programs, raise the limit of memory (`ulimit -v`), "
    b"or use a smaller model or batch. What the last checkpoint holds is kept; go on with --resume.\n"
)  # made beforehand: there is no memory for it later


@contextmanager
def end_without_memory() -> Iterator[None]:
    """Inside the block, end the process with its reason when a thread found no memory to begin with."""
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
    """End the process with its reason, which takes no memory."""
    with suppress(OSError):
        os.write(2, _NO_MEMORY_LEFT)
    os._exit(EXIT_WITHOUT_MEMORY)


class ThreadStarts:
    """The threads of this process that were started and have not begun."""

    def __init__(self) -> None:
        self._waited: dict[threading.Thread, float] = {}

    def lost(self, passed: float) -> bool:
        """Return whether one of them has not begun for `THREAD_START_S`; `passed` are the seconds since the last question."""
        waiting = [thread for thread in threading.enumerate() if not thread.is_alive()]
        self._waited = {thread: self._waited.get(thread, 0.0) + passed for thread in waiting}
        return any(waited > THREAD_START_S for waited in self._waited.values())


def versions_of(packages: Sequence[str]) -> dict[str, str | None]:
    """Return the version of Python and of each package, by name; None for one that is not installed."""
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
    """Leave all objects of now out of the collection of garbage until the block ends, which keeps those that follow apart from them.

    Libraries and models are some hundred thousand objects. A step makes and drops many small ones, and each full collection would
    walk over all: a fifth of the time of tiny models. Does nothing where the caller has frozen objects itself.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()  # what is garbage now would stay
    gc.freeze()
    # A generator that was left in its middle may end when Python does, after its modules have lost their names.
    unfreeze = gc.unfreeze
    try:
        yield
    finally:
        unfreeze()
