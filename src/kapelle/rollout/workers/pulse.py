"""A few bytes that a worker and its player share: that the worker runs, and which session computes at this moment.

The player reads them when the worker is gone or does not answer, when nothing else can be asked any more.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

_FORM = struct.Struct("=QQ")


class Pulse:
    """Two numbers in a file without a name; sessions are numbered from 1."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Make one, or open that of the other process by its descriptor."""
        if descriptor is None:
            file, path = tempfile.mkstemp(prefix="kapelle-pulse-")
            os.unlink(path)  # noqa: PTH108 - the same, and at once
            os.ftruncate(file, _FORM.size)
            descriptor = file
        self.descriptor = descriptor
        self._shared = mmap.mmap(descriptor, _FORM.size)

    @property
    def beats(self) -> int:
        """How often the worker has said that it runs."""
        return int(_FORM.unpack_from(self._shared)[0])

    @property
    def session(self) -> int:
        """The session that computes; 0 for none."""
        return int(_FORM.unpack_from(self._shared)[1])

    def beat(self) -> None:
        """Say that this process runs."""
        struct.pack_into("=Q", self._shared, 0, self.beats + 1)

    def enter(self, session: int) -> None:
        """Say which session computes from now on."""
        struct.pack_into("=Q", self._shared, 8, session)

    def leave(self) -> None:
        """Say that none computes."""
        self.enter(0)

    def close(self) -> None:
        """Give the memory back."""
        self._shared.close()
        os.close(self.descriptor)
