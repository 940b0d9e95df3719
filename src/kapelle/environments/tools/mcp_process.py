"""A server program that is spoken to line by line, from an event loop.

It gets no environment but what is named, a line of it is bounded, and its whole process group is ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Sequence

from kapelle.environments.tools.contract import Lost

MAX_MESSAGE = 1 << 20
"""Bytes of one message."""
ENDED = "The server has ended."
"""What is said of a server where nothing more is known."""


class Program:
    """A running program and its two pipes; made and ended in any thread, read and written in one event loop."""

    def __init__(self, command: Sequence[str], env: Sequence[str]) -> None:
        """Start it with PATH, HOME, LANG and the variables named; Lost when it cannot be started."""
        passed = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", *env) if name in os.environ}
        self._unread = bytearray()
        try:
            self.process = subprocess.Popen(  # noqa: S603 (the program that the settings name)
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=passed,
                start_new_session=True,
            )
        except OSError as error:
            raise Lost(f"it cannot be started ({error.strerror}).") from None
        assert self.process.stdin is not None, "opened as a pipe"
        assert self.process.stdout is not None, "opened as a pipe"
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    async def read_line(self) -> bytes:
        """Return what it writes up to the end of a line; Lost when it ends, or writes too much at once."""
        while b"\n" not in self._unread:
            try:
                part = os.read(self._out, 65536)
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await _until(loop.add_reader, loop.remove_reader, self._out)
                continue
            if not part:
                raise Lost(ENDED)
            self._unread += part
            if len(self._unread) > MAX_MESSAGE:
                raise Lost(f"The server sent more than {MAX_MESSAGE:,} bytes at once.")
        line, _, rest = bytes(self._unread).partition(b"\n")
        self._unread = bytearray(rest)
        return line

    async def write_line(self, data: bytes) -> None:
        """Write a line, waiting while it reads nothing; Lost when it has ended."""
        left = memoryview(data + b"\n")
        while left:
            try:
                left = left[os.write(self._in, left) :]
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await _until(loop.add_writer, loop.remove_writer, self._in)
            except OSError:
                raise Lost(ENDED) from None

    def kill(self) -> None:
        """End it and everything that it started in its group; once, because its number may become another one's."""
        if self.process.returncode is not None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.poll()
        self.process.wait()

    def close(self) -> None:
        """Close its pipes, which nobody reads or writes any more."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


async def _until(
    add: Callable[[int, Callable[[], None]], None], remove: Callable[[int], bool], pipe: int
) -> None:
    ready = asyncio.Event()
    add(pipe, ready.set)
    try:
        await ready.wait()
    finally:
        remove(pipe)
