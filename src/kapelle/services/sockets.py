"""Serves WebSockets with the same check of callers as all other routes, and with deadlines for slow peers.

Importing this module requires websockets in addition to the packages that `services/http.py` requires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from kapelle.services.binding import Binding
from kapelle.services.http import (
    STALL_SECONDS,
    Application,
    HttpServer,
    check_call,
    error_response,
    headers_of,
    plain_path,
)
from kapelle.services.request_errors import RequestError, busy

Talk = Callable[[WebSocket], Awaitable[None]]
"""A function that handles the messages of one WebSocket, from its opening until it is closed."""


class SocketApplication(Application):
    """An application with routes, and with WebSockets at one path."""

    def __init__(
        self, binding: Binding, routes: Sequence[Route], path: str, talk: Talk, most: int, full: str
    ) -> None:
        """Create the application. At most `most` WebSockets may be open, and a further WebSocket receives the message `full`."""
        super().__init__(binding, routes)
        self._bound, self._path, self._talk, self._most, self._full = binding, path, talk, most, full
        self.connected = 0
        """The number of open WebSockets."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one call, or serve one WebSocket from its opening until it is closed."""
        if scope["type"] != "websocket":
            await super().__call__(scope, receive, send)
            return
        try:
            # A page of another site may open a WebSocket without a check by the browser, so this counts as a call that
            # changes state.
            check_call(self._bound, "POST", headers_of(scope))
            if plain_path(scope["path"]) != self._path:
                raise RequestError(404, f"WebSockets are at {self._path}.", None, "not_found")
            if self.connected >= self._most:
                raise busy(self._full)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        socket = WebSocket(scope, receive, send)
        self.connected += 1
        try:
            await socket.accept()
            await self._talk(socket)
        except (WebSocketDisconnect, KeyError, RuntimeError):  # the peer has disconnected, or has sent bytes
            pass
        finally:
            self.connected -= 1


class SocketConnection(WebSocketsSansIOProtocol):
    """A WebSocket connection with a deadline for slow peers, which uvicorn does not provide."""

    _stalled: asyncio.TimerHandle | None = None

    async def send(self, message: ASGISendEvent) -> None:
        """Send a message to the peer."""
        await super().send(message)
        # A RequestError is a full response to the caller; uvicorn would log a missing handshake.
        self.handshake_complete |= self.initial_response is not None and self.close_sent

    def pause_writing(self) -> None:
        """Start the deadline for a peer that does not read."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Remove the deadline because the peer has read."""
        super().resume_writing()
        self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the deadline because the connection was closed."""
        self._forget()
        super().connection_lost(exc)

    def _forget(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def socket_server(binding: Binding, application: SocketApplication, most_bytes: int) -> HttpServer:
    """Return a server that also accepts WebSockets, with messages of at most `most_bytes`. Raises the errors of `HttpServer`."""
    return HttpServer(binding, application, sockets=SocketConnection, message_bytes=most_bytes)
