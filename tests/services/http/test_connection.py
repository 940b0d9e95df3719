"""Slow peers: endless heads and unread answers; and TLS."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import threading
import warnings
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route
from tests.support.tls import certificate_here

from kapelle.services import http as connection
from kapelle.services.binding import Binding
from kapelle.services.http import Application, Call, EventStream, HttpServer, JsonAnswer, route
from kapelle.types import Json

TOKEN = "the-right-token-0123456789"  # noqa: S105


class Torrent:
    """An endless stream, and a short answer."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def routes(self) -> list[Route]:
        return [route("GET", "/stream", self.stream), route("GET", "/good", self.good)]

    async def good(self, call: Call) -> JsonAnswer:
        return JsonAnswer({"good": True})

    async def stream(self, call: Call) -> EventStream:
        return EventStream(self._events())

    async def _events(self) -> AsyncGenerator[Json | str, None]:
        self.begun.set()
        try:
            while True:
                yield "x" * 65_536
                await asyncio.sleep(0)
        finally:
            self.ended.set()


@pytest.fixture
def torrent() -> Torrent:
    return Torrent()


@pytest.fixture
def server(torrent: Torrent, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.3)
    with HttpServer(Binding(), Application(Binding(), torrent.routes())) as served:
        yield served


def said(peer: socket.socket) -> bytes:
    """Return all bytes until the other side closes."""
    read = b""
    try:
        while more := peer.recv(65_536):
            read += more
    except ConnectionError:
        pass
    return read


@pytest.mark.parametrize("head", [b"", b"G", b"GET /good HTTP/1.1\r\nhost: localhost\r\nx: "])
def test_an_endless_head_times_out(server: HttpServer, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as peer:
        peer.sendall(head)
        assert said(peer) == b""


def test_a_call_with_two_lengths_is_refused_and_its_connection_closed(server: HttpServer) -> None:
    """A proxy before the service may have taken the rest as a body or as another call."""
    for method in (b"GET", b"POST"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as peer:
            head = b" /good HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            lengths = b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
            smuggled = b"GET /good HTTP/1.1\r\nhost: localhost\r\n\r\n"
            peer.sendall(method + head + lengths + b"0\r\n\r\n" + smuggled)
            answer = said(peer)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"two_lengths" in answer
        assert answer.count(b"HTTP/1.1") == 1


def test_the_stream_of_a_client_that_stops_reading_ends(server: HttpServer, torrent: Torrent) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as peer:
        peer.sendall(b"GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert torrent.begun.wait(60)
        assert torrent.ended.wait(60)
        assert httpx.get(f"{server.url}/good").json() == {"good": True}


def test_tls(torrent: Torrent, tmp_path: Path) -> None:
    certificate, key = certificate_here(tmp_path)
    binding = Binding("localhost", token=TOKEN, certificate=certificate, key=key)
    trusted = ssl.create_default_context(cafile=str(certificate))
    headers = {"authorization": f"Bearer {TOKEN}"}
    with HttpServer(binding, Application(binding, torrent.routes())) as served:
        assert served.url.startswith("https://localhost:")
        with httpx.Client(verify=trusted, timeout=60.0) as client:
            assert client.get(f"{served.url}/good", headers=headers).json() == {"good": True}
            assert client.get(f"{served.url}/good").status_code == 401
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{served.url}/good", headers=headers)
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"{served.url.replace('https', 'http')}/good", headers=headers)


@pytest.mark.sample(2)
@pytest.mark.parametrize("speaks", [True, False])
def test_a_half_closed_connection_leaves_no_socket(torrent: Torrent, tmp_path: Path, speaks: bool) -> None:
    certificate, key = certificate_here(tmp_path)
    binding = Binding("localhost", token=TOKEN, certificate=certificate, key=key)
    trusted = ssl.create_default_context(cafile=str(certificate))
    gc.collect()
    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always", ResourceWarning)
        with HttpServer(binding, Application(binding, torrent.routes())) as served:
            peer = socket.create_connection(("localhost", served.port), timeout=60)
            if speaks:
                peer = trusted.wrap_socket(peer, server_hostname="localhost")
                peer.sendall(b"GET /good HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert b"401" in peer.recv(65_536)
        del served
        gc.collect()
        peer.close()
    assert [str(warning.message) for warning in left] == []
