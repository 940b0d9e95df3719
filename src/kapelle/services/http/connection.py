"""One connection of a server, with deadlines that uvicorn has not: for a head that comes slowly, and for a peer that stops reading.

Imports uvicorn, an extra; so it is imported where a server is made.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0
"""For which the head of a call may take to arrive, from its first byte or from the connection's start."""
STALL_SECONDS = 60.0
"""After which a peer that reads nothing of what waits for it is given up."""


KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds after which the system asks whether an idle peer is there, between two questions, and how many it asks: a machine
that vanished closes no connection."""

Peer = tuple[str, int]
"""Address and port of the other end of a connection."""


class Doorkeeper(Protocol):
    """Learns which connections are open; called in the server's event loop."""

    def opened(self, peer: Peer) -> None:
        """Learn of a new connection."""
        ...

    def closed(self, peer: Peer) -> None:
        """Learn that one is gone."""
        ...


class Connection(H11Protocol):
    """Speaks HTTP/1.1 with one peer, who may be slow, but not for ever."""

    def __init__(self, *given: Any, doorkeeper: Doorkeeper | None = None, **named: Any) -> None:
        super().__init__(*given, **named)
        self._doorkeeper = doorkeeper
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a call."""
        super().connection_made(transport)
        if self._doorkeeper is not None and self.client is not None:
            self._doorkeeper.opened(self.client)
            held: socket.socket = transport.get_extra_info("socket")
            held.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):  # not on every system
                    held.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
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
        if self._doorkeeper is not None and self.client is not None:
            self._doorkeeper.closed(self.client)

    def _gives_up_after(self, seconds: float) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, self.transport.abort)


def _ended(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a deadline; return None, in its place."""
    if timer is not None:
        timer.cancel()
    return None
