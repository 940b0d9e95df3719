"""Builds and steers `shim.c`, the preloaded library through which the harness sees and breaks system calls."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("shim.c")
_PRELOAD = "LD_PRELOAD"
_BUILT = "KAPELLE_FAULTS_SHIM"


class Calls(IntFlag):
    """Classes of system calls on files of one folder."""

    OPEN = 1
    READ = 2
    WRITE = 4
    FSYNC = 8
    RENAME = 16
    UNLINK = 32
    MKDIR = 64
    TRUNCATE = 128
    CHANGES = 4 | 8 | 16 | 32 | 64 | 128
    ALL = 255


class Action(IntEnum):
    """What happens at a call."""

    COUNT = 0
    FAIL = 1
    FAIL_FOR_GOOD = 2
    KILL = 3
    RECORD = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """Which call of a process meets which fate."""

    folder: Path
    action: Action
    at: int = 0
    """From 1."""
    classes: Calls = Calls.ALL
    number: int = 0
    """`errno` of a call that fails."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One change that a process made under the folder, as it was written down."""

    kind: Calls
    path: str
    """Relative to the folder."""
    target: str
    """Of a renaming."""
    offset: int
    """Where a write begins, or the size that a file is cut to."""
    data: bytes


def start_with_shim() -> None:
    """Build the library and start this program again with it, unless that has been done or cannot be."""
    if _BUILT in os.environ:
        os.environ.pop(_PRELOAD, None)  # for what a run starts itself
        return
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return
    built = Path(os.environ.get("TMPDIR", "/tmp")) / f"kapelle-faults-shim-{os.getpid()}.so"  # noqa: S108
    subprocess.run(
        [compiler, "-O1", "-fPIC", "-shared", "-o", str(built), str(_SOURCE), "-ldl", "-lpthread"], check=True
    )
    environment = {**os.environ, _PRELOAD: str(built), _BUILT: str(built)}
    os.execve(sys.executable, [sys.executable, "-m", "tests.faults", *sys.argv[1:]], environment)  # noqa: S606


def remove_built() -> None:
    """Remove the library's file; the process has it in memory."""
    if _BUILT in os.environ:
        Path(os.environ[_BUILT]).unlink(missing_ok=True)


def missing() -> str | None:
    """Return why calls cannot be broken here, None when they can."""
    if _BUILT in os.environ:
        return None
    return "it needs Linux and a C compiler (cc)"


def under(plan: Plan, call: Callable[[], int], counted: Path | None = None) -> Callable[[], int]:
    """Return a call whose process meets the plan; the number of its calls, or what it did, goes to `counted`."""

    def begin() -> int:
        library = _library()
        log = -1
        if plan.action is Action.RECORD:
            assert counted is not None, "what is recorded goes to a file"
            log = os.open(counted, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        folder = str(plan.folder).encode()
        library.faults_arm(folder, int(plan.classes), int(plan.action), plan.at, plan.number, log)
        try:
            return call()
        finally:
            calls = library.faults_calls()
            library.faults_disarm()
            if counted is not None and plan.action is not Action.RECORD:
                counted.write_text(str(calls), "utf-8")

    return begin


def shift_clock(seconds: float) -> None:
    """Let this process read another time of day; clocks that only go forward are left alone."""
    _library().faults_shift_clock(int(seconds * 1e9))


def read_operations(log: Path, folder: Path) -> Iterator[Operation]:
    """Yield what a recorded process changed under the folder, in its order."""
    content = log.read_bytes()
    place, head = 0, struct.Struct("=5q")
    while place < len(content):
        kind, length, other, offset, size = head.unpack_from(content, place)
        place += head.size
        path = content[place : place + length].decode()
        target = content[place + length : place + length + other].decode()
        place += length + other
        carried = size if kind == Calls.WRITE else 0
        data = content[place : place + carried]
        place += carried
        yield Operation(Calls(kind), _relative(path, folder), _relative(target, folder), offset, data)


def _relative(path: str, folder: Path) -> str:
    return os.path.relpath(path, folder) if path else ""


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ[_BUILT])
    library.faults_arm.argtypes = [
        ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int
    ]  # fmt: skip
    library.faults_calls.restype = ctypes.c_long
    library.faults_shift_clock.argtypes = [ctypes.c_int64]
    return library
