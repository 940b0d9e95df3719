"""An outside program that is started for one episode."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from kapelle.environments.external.switchboard import Seat
from kapelle.errors import EpisodeError

SHOWN = 500
"""Characters of what a program that failed has said."""
LAST_S = 1.0
"""Seconds for the end of what is said by a program whose processes were all ended."""
TIDY_S = 2.0
"""Seconds that a program has to end once its episode is over."""
KEPT = 64 << 10
"""Bytes that are kept of what a program says."""


def variables(seat: Seat, url: str, token: str | None) -> Mapping[str, str]:
    """Return the environment variables by which a program finds its agents and its task."""
    return {
        **os.environ,
        "OPENAI_BASE_URL": f"{url}/sessions/{seat.name}/v1",
        "OPENAI_API_KEY": token or "none",
        "KAPELLE_SESSION": seat.name,
        "KAPELLE_TASK": seat.task.id,
        "KAPELLE_SPLIT": str(seat.task.data["split"]),
        "KAPELLE_INDEX": str(seat.task.data["index"]),
        "KAPELLE_SEED": str(seat.seed),
    }


class _Exit(asyncio.subprocess.SubprocessStreamProtocol):
    """Tells when a process has ended; `Process.wait` also waits for all that it started and that share its output."""

    def __init__(self) -> None:
        super().__init__(limit=1 << 16, loop=asyncio.get_running_loop())
        self.ended = asyncio.Event()

    def process_exited(self) -> None:
        self.ended.set()
        super().process_exited()


class Program:
    """A process of its own group, which ends with its episode."""

    def __init__(self, transport: asyncio.SubprocessTransport, exited: _Exit) -> None:
        self._transport, self._exited = transport, exited
        self._process = asyncio.subprocess.Process(transport, exited, asyncio.get_running_loop())
        self._said = bytearray()
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, command: Sequence[str], seat: Seat, url: str, token: str | None) -> Program:
        """Start a program; EpisodeError where that fails."""
        try:
            transport, exited = await asyncio.get_running_loop().subprocess_exec(
                _Exit,
                *command,
                env=variables(seat, url, token),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EpisodeError(
                f"`environment.command` cannot be started: {error.strerror} ({command[0]})."
            ) from None
        return cls(transport, exited)

    async def ended(self) -> str:
        """Wait until it ends and return how, in words."""
        await self._exited.ended.wait()
        code = self._process.returncode
        # What it started may play on where it ended well, as a wrapper does. One that failed has left it behind.
        await asyncio.wait((self._reading,), timeout=LAST_S if code else None)
        said = " ".join(self._said.decode("utf-8", "replace").split())[-SHOWN:]
        return f"The program ended with code {code} and posted no reward. It said: {said or '(nothing)'}"

    async def end(self) -> None:
        """End it and everything that it started; it may tidy up before, as a container's client ends its container."""
        self._signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(TIDY_S):
                await self._exited.ended.wait()
        self._signal(signal.SIGKILL)
        await self._exited.ended.wait()
        await asyncio.wait((self._reading,), timeout=LAST_S)
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        self._transport.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while piece := await self._process.stdout.read(1 << 16):
            self._said = (self._said + piece)[-KEPT:]
