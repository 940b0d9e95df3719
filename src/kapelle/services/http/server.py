"""A service that listens, on a thread of its own; uvicorn speaks the protocol."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kapelle.errors import ConfigError
from kapelle.services.binding import Binding
from kapelle.services.http.application import Asgi

if TYPE_CHECKING:
    from uvicorn import Server


IDLE_SECONDS = 30
"""After which a connection without a call is closed."""
CONNECTIONS = 4096
"""Open at once; further ones are told that the service is busy."""


def check_installed(extra: str = "serve") -> None:
    """Raise ConfigError when the package that speaks HTTP is missing, naming the extra that brings it."""
    try:
        import uvicorn  # noqa: F401
    except ImportError:
        raise ConfigError(f"Serving needs an extra: pip install 'kapelle[{extra}]'.") from None


class HttpServer:
    """Serves an application until it is closed; a context manager."""

    def __init__(
        self,
        binding: Binding,
        application: Asgi,
        doorkeeper: Doorkeeper | None = None,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """Bind the port; raises ConfigError when it is taken or an extra is missing.

        A connection without a call is closed after `idle_seconds`; the `doorkeeper` learns which ones are open.
        """
        check_installed()
        import uvicorn

        binding.tls()  # files that cannot be used are refused here
        self._binding = binding
        self._socket = _bound(binding)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            application,
            http=cast("type[asyncio.Protocol]", partial(Connection, doorkeeper=doorkeeper)),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=math.ceil(idle_seconds),
            limit_concurrency=CONNECTIONS,
            ssl_certfile=binding.certificate,
            ssl_keyfile=binding.key,
        )
        config.load()
        self._server: Server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="kapelle-http", daemon=True)
        self._started = threading.Event()

    @property
    def url(self) -> str:
        """The address under which it is found."""
        return self._binding.url(self.port)

    def start(self) -> None:
        """Begin to serve; returns when calls are accepted."""
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            self._started.wait(0.005)
        assert self._server.started, "its port is bound and its settings are loaded"

    def drain(self, seconds: float) -> bool:
        """Accept no more calls, answer those that were accepted, and return whether all were within `seconds`."""
        self._server.should_exit = True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop now; calls that are not answered yet are broken off."""
        self._server.should_exit = self._server.force_exit = True
        if self._thread.ident is not None:
            self._thread.join(5.0)
        self._socket.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._socket])
        # A peer that does not end its side (of TLS, say) would keep a socket open when this loop is gone.
        while left := list(self._server.server_state.connections):
            for connection in left:
                connection.transport.abort()
            await asyncio.sleep(0)


def check_free(binding: Binding) -> None:
    """Raise ConfigError where a service could not listen now; for commands that first load for a while."""
    _bound(binding).close()


def _bound(binding: Binding) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            binding.host, binding.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except BaseException:
            made.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"Nothing can listen on {binding.host}:{binding.port}: {error.strerror}. Name another port or host."
        ) from None
    return made


# -------- One connection of a server, with deadlines that uvicorn has not: for a head that comes slowly, and for a peer that stops reading
#
# Imports uvicorn, an extra; so it is imported where a server is made.

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
