"""One connection of a server, with deadlines that uvicorn has not: for a head that comes slowly, and for a peer that stops reading.

Imports uvicorn, an extra; so it is imported where a server is made.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0
"""For which the head of a call may take to arrive, from its first byte or from the connection's start."""
STALL_SECONDS = 60.0
"""After which a peer that reads nothing of what waits for it is given up."""


class Connection(H11Protocol):
    """Speaks HTTP/1.1 with one peer, who may be slow, but not for ever."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a call."""
        super().connection_made(transport)
        self._head = self._gives_up_after(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Take bytes; the deadline of a head ends where the head does."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head = _ended(self._head)
        elif self._head is None:
            self._head = self._gives_up_after(HEAD_SECONDS)

    def pause_writing(self) -> None:
        """Wait for the peer to read."""
        super().pause_writing()
        self._stall = self._gives_up_after(STALL_SECONDS)

    def resume_writing(self) -> None:
        """Go on: the peer has read."""
        super().resume_writing()
        self._stall = _ended(self._stall)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also one whose last answer was not read."""
        super().timeout_keep_alive_handler()
        self._gives_up_after(STALL_SECONDS)

    def shutdown(self) -> None:
        """Close when what was accepted is answered, and read."""
        super().shutdown()
        if self.transport.is_closing():
            self._gives_up_after(STALL_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._head, self._stall = _ended(self._head), _ended(self._stall)
        super().connection_lost(exc)

    def _gives_up_after(self, seconds: float) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, self.transport.abort)


def _ended(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a deadline; return None, in its place."""
    if timer is not None:
        timer.cancel()
    return None
