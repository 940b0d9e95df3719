"""A few bytes that a process shares with the one that started it: that it runs, and what it does at this moment.

The other one reads them when the process is gone or does not answer, when nothing else can be asked any more.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

_FORM = struct.Struct("=QQB")
_MOST = 160
"""Most bytes of what it says that it does."""


class Pulse:
    """Numbers and a short text in a file without a name; sessions are numbered from 1."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Make one, or open that of the other process by its descriptor."""
        size = _FORM.size + _MOST
        if descriptor is None:
            file, path = tempfile.mkstemp(prefix="kapelle-pulse-")
            os.unlink(path)  # noqa: PTH108 - the same, and at once
            os.ftruncate(file, size)
            descriptor = file
        self.descriptor = descriptor
        self._shared = mmap.mmap(descriptor, size)

    @property
    def beats(self) -> int:
        """How often the process has said that it runs."""
        return int(_FORM.unpack_from(self._shared)[0])

    @property
    def session(self) -> int:
        """The session that computes; 0 for none."""
        return int(_FORM.unpack_from(self._shared)[1])

    @property
    def doing(self) -> str:
        """What the process said last that it does; empty before it has said anything."""
        length = int(_FORM.unpack_from(self._shared)[2])
        return self._shared[_FORM.size : _FORM.size + length].decode("utf-8", "replace")

    def beat(self) -> None:
        """Say that this process runs."""
        struct.pack_into("=Q", self._shared, 0, self.beats + 1)

    def enter(self, session: int) -> None:
        """Say which session computes from now on."""
        struct.pack_into("=Q", self._shared, 8, session)

    def leave(self) -> None:
        """Say that none computes."""
        self.enter(0)

    def say(self, doing: str) -> None:
        """Say what this process does from now on."""
        text = doing.encode("utf-8", "replace")[:_MOST]
        self._shared[_FORM.size : _FORM.size + len(text)] = text
        struct.pack_into("=B", self._shared, 16, len(text))

    def close(self) -> None:
        """Give the memory back."""
        self._shared.close()
        os.close(self.descriptor)
