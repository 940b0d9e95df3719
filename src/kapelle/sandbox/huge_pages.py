"""Starts programs without transparent huge pages: of one that is mapped in part all stays, and no sum sees the rest.

What a process may have is kept by what it starts, across `execve` too (prctl(2), PR_SET_THP_DISABLE), and no program between
here and the sandbox can set it: so this process goes without for as long as a start takes. That is only done where the
machine gives huge pages unasked; asking for them is what the system call filter refuses.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from pathlib import Path

_SETTING = Path("/sys/kernel/mm/transparent_hugepage")
_PR_SET_THP_DISABLE, _PR_GET_THP_DISABLE = 41, 42


@contextlib.contextmanager
def without_huge_pages() -> Iterator[None]:
    """Let what is started within have no huge pages."""
    if not given_unasked(_SETTING):
        yield
        return
    switch = _switch()
    switch.enter()
    try:
        yield
    finally:
        switch.leave()


def given_unasked(setting: Path) -> bool:
    """Return whether a folder of the kernel's settings gives huge pages of some size to whoever does not ask for them."""
    files = [setting / "enabled", *setting.glob("hugepages-*/enabled")]
    return any("[always]" in file.read_text() for file in files if file.is_file())


class _Switch:
    """The setting of this process, for starts that overlap."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._starting = 0
        self._before = 0

    def enter(self) -> None:
        with self._turn:
            if self._starting == 0:
                self._before = _prctl(_PR_GET_THP_DISABLE, 0)
                _prctl(_PR_SET_THP_DISABLE, 1)
            self._starting += 1

    def leave(self) -> None:
        with self._turn:
            self._starting -= 1
            if self._starting == 0:
                _prctl(_PR_SET_THP_DISABLE, self._before)


@functools.cache
def _switch() -> _Switch:
    return _Switch()


def _prctl(option: int, value: int) -> int:
    return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0))
