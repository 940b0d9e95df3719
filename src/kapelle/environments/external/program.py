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


class Program:
    """A process of its own group, which ends with its episode."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._said = bytearray()
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, command: Sequence[str], seat: Seat, url: str, token: str | None) -> Program:
        """Start a program; EpisodeError where that fails."""
        try:
            process = await asyncio.create_subprocess_exec(
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
        return cls(process)

    async def ended(self) -> str:
        """Wait until it ends and return how, in words."""
        code = await self._process.wait()
        await asyncio.shield(self._reading)  # who waits may stop; what it started may go on and say more
        said = " ".join(self._said.decode("utf-8", "replace").split())[-SHOWN:]
        return f"The program ended with code {code} and posted no reward. It said: {said or '(nothing)'}"

    async def end(self) -> None:
        """End it and everything that it started; it may tidy up before, as a container's client ends its container."""
        self._signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(TIDY_S):
                await self._process.wait()
        self._signal(signal.SIGKILL)
        await self._process.wait()
        await asyncio.wait((self._reading,), timeout=LAST_S)
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while piece := await self._process.stdout.read(1 << 16):
            self._said = (self._said + piece)[-KEPT:]
