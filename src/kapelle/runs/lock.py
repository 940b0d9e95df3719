"""Ensures that each run directory has only one trainer, with locks of the operating system that end with their process.

Two objects are locked: the run directory, and the file `lock` in it, which contains the owner. The lock of the
directory is decisive, because the file can be removed or replaced, and the lock of a new file would be a different
lock. The file shows the owner to users. The file is the only lock on disks that cannot lock directories (NFS).

Before each write, the owner checks that the path still leads to the locked directory (`RunLock.recheck`). Therefore,
the owner never writes to a directory that was moved, deleted or replaced.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from kapelle.errors import RunDirectoryError
from kapelle.runtime.files import PARTIAL, explain, replace_file, write_all

_ATTEMPTS = 100


class RunLock:
    """Exclusive use of a directory by this process, until it calls `release` or terminates.

    The argument `path` is the file `lock` in the directory. The file is not removed by a release, because only the
    locks of the operating system matter. Forked child processes do not keep the locks, so a grader that outlives its
    killed trainer does not block the next trainer.

    Raises RunDirectoryError if another process holds one of the locks, if `lock` is not a regular file, or if the disk
    does not support locks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder: int | None = None
        self._file: int | None = None
        self._folder_locked = False
        try:
            self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _HELD.add(self)
            self._folder_locked = self._lock_folder(self._folder)
            self._file = self._take_file()
        except OSError as error:
            self._close()
            raise RunDirectoryError(f"Cannot lock {path}: {explain(error)}") from error
        except BaseException:
            self._close()
            raise

    def recheck(self) -> None:
        """Check, before a write, that this process is still the only owner of the directory at its path.

        If the directory is locked, a missing file `lock` is recreated, because no other process can have taken the run.
        Raises RunDirectoryError if the directory was moved, deleted or replaced, or if another process may own it.
        """
        if self._folder is None or self._file is None:
            raise RunDirectoryError(
                f"{self._path.parent} is no longer locked by this process, so it must not write there."
            )
        if not _is_same(self._path.parent.stat, self._folder):
            raise RunDirectoryError(
                f"{self._path.parent} was moved, deleted or replaced while this process was writing "
                "to it, so the process stops. "
                "Move the directory back, or resume the run at its new path with --resume."
            )
        if _is_same(self._path.lstat, self._file):
            return
        if not self._folder_locked:
            raise RunDirectoryError(
                f"The file {self._path} was removed or replaced, so another trainer may own this run "
                "now, and this one "
                "stops. End all other trainers, then continue with --resume."
            )
        try:
            file = self._take_file()
        except OSError as error:
            raise RunDirectoryError(f"Cannot lock {self._path} again: {explain(error)}") from error
        os.close(self._file)
        self._file = file

    def release(self) -> None:
        """Release the directory. A second call has no effect."""
        for descriptor in (self._file, self._folder):
            if descriptor is not None:
                # Unlock explicitly: a process that was forked by code other than Python's may still have the descriptor.
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        for descriptor in (self._file, self._folder):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._folder = None

    def _lock_folder(self, folder: int) -> bool:
        """Lock the directory. Returns False if the disk cannot lock directories."""
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._in_use(_text_of(self._path)) from error
        except OSError:
            return False
        return True

    def _take_file(self) -> int:
        """Open the file `lock`, lock it and write the owner into it. This method may raise OSError."""
        for _ in range(_ATTEMPTS):
            descriptor = self._open_file()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same(
                    self._path.lstat, descriptor
                ):  # otherwise the file was replaced between the two calls
                    os.ftruncate(descriptor, 0)
                    owner = {
                        "pid": os.getpid(),
                        "host": socket.gethostname(),
                        "since": now(),
                        "born": _born(os.getpid()),
                    }
                    write_all(descriptor, json.dumps(owner).encode())
                    return descriptor
            except BlockingIOError as error:
                text = os.pread(descriptor, 4096, 0)
                os.close(descriptor)
                raise self._in_use(text) from error
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        raise RunDirectoryError(
            f"Cannot lock {self._path}: another program keeps replacing it. End that program."
        )

    def _open_file(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        if self._path.is_symlink() or (self._path.exists() and not self._path.is_file()):
            raise RunDirectoryError(
                f"{self._path} is a link or folder instead of a regular file, so it cannot be locked. "
                "Remove it."
            )
        descriptor = os.open(self._path, flags, 0o644)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise RunDirectoryError(f"{self._path} is not a regular file, so it cannot be locked. Remove it.")
        if found.st_nlink > 1 and self._folder_locked:
            # The run was copied with hard links: another run uses the same file as its lock.
            os.close(descriptor)
            replace_file(self._path, b"", sync=False)
            descriptor = os.open(self._path, flags, 0o644)
        return descriptor

    def _in_use(self, text: bytes) -> RunDirectoryError:
        try:
            owner = json.loads(text)
            who = f"process {owner['pid']} on {owner['host']} since {owner['since']}"
        except (ValueError, KeyError, TypeError, RecursionError):
            who = "another process"
        return RunDirectoryError(
            f"{self._path.parent} is in use by {who}. Wait until it ends, end it, or choose another "
            "--run-dir."
        )


LEFT_BEHIND = frozenset({"lock", f".lock{PARTIAL}"})
"""The names of the files that a lock leaves in its directory."""

_HELD: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child shares the open files, so the locks would be held for as long as the child lives.
    for lock in list(_HELD):
        lock._close()  # noqa: SLF001 - in the same module


os.register_at_fork(after_in_child=_close_in_child)


def now() -> str:
    """Return the current time in UTC, in ISO 8601 format with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def has_ended(pid: int) -> bool:
    """Return whether a process of this machine has ended, even if its parent has not taken note of its end (a zombie)."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except (ProcessLookupError, OverflowError):
        return True
    except (OSError, IndexError):  # the process belongs to another user, or the system has no /proc
        return False


def is_another_process(lock: Path, pid: int) -> bool:
    """Return whether a running process has the process id of a lock's last owner but is a different process.

    This can happen because the operating system reuses process ids. Returns False if the answer cannot be determined.
    """
    try:
        owner = json.loads(_text_of(lock))
        recorded = owner["born"] if owner["pid"] == pid else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    born = _born(pid)
    return None not in (recorded, born) and recorded != born


def has_restarted(lock: Path) -> bool:
    """Return whether this machine has restarted since the lock was last taken. Returns False if the answer cannot be determined."""
    here = _born(os.getpid())
    try:
        return (
            here is not None
            and here.partition("/")[0] != json.loads(_text_of(lock))["born"].partition("/")[0]
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _born(pid: int) -> str | None:
    """Return the boot id and the start time of a process, or None if the system has no /proc.

    These values distinguish the process from other processes with the same id.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        # The program's name is in parentheses and may contain any character; field 22 is the start time in clock ticks.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return f"{boot}/{int(fields[19])}"
    except (OSError, ValueError, IndexError):
        return None


def _is_same(look: Callable[[], os.stat_result], descriptor: int) -> bool:
    try:
        found = look()
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def _text_of(path: Path) -> bytes:
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            return file.read(4096)
    except OSError:
        return b""
