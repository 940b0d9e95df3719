"""A service that listens, on a thread of its own; uvicorn speaks the protocol."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, Self, cast

from kapelle.errors import ConfigError
from kapelle.services.binding import Binding
from kapelle.services.http.application import Asgi

if TYPE_CHECKING:
    from uvicorn import Server

    from kapelle.services.http.connection import Doorkeeper

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

        from kapelle.services.http.connection import Connection

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
