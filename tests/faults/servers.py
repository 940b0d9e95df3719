"""A server that should speak OpenAI's protocol, and does everything else: one process, one answer a connection."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

Answer = Callable[[socket.socket], None]


def _sends(*pieces: bytes) -> Answer:
    def answer(peer: socket.socket) -> None:
        for piece in pieces:
            peer.sendall(piece)

    return answer


def _sends_after(first: bytes, again: bytes) -> Answer:
    def answer(peer: socket.socket) -> None:
        peer.sendall(first)
        while True:
            peer.sendall(again)

    return answer


def _http(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _json(value: object) -> bytes:
    return _http("200 OK", json.dumps(value).encode(), "Content-Type: application/json")


def _reset(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _trickle(peer: socket.socket) -> None:
    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while True:
        peer.sendall(b" ")
        time.sleep(0.05)


_ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_CHUNK = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
ANSWERS: Mapping[str, Answer] = {
    "500": _sends(_http("500 Internal Server Error", b"no")),
    "429": _sends(_http("429 Too Many Requests", b"{}", "Retry-After: 86400")),
    "a redirect to itself": _sends(_http("307 Temporary Redirect", b"", "Location: /v1/chat/completions")),
    "garbage": _sends(os.urandom(400)),
    "no JSON": _sends(_http("200 OK", b"<html>hello")),
    "another JSON": _sends(_json([1, 2])),
    "no choices": _sends(_json({"choices": []})),
    "a choice of numbers": _sends(_json({"choices": [{"message": {"content": 7}}]})),
    "a surrogate": _sends(_json({"choices": [{"message": {"content": "\udcff 5"}}]})),
    "NaN": _sends(_http("200 OK", b'{"choices": NaN}')),
    "deep JSON": _sends(_http("200 OK", b"[" * 200_000)),
    "half an answer": _sends(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"),
    "a reset": _reset,
    "nothing": _sends(),
    "200 MB": _sends(b"HTTP/1.1 200 OK\r\nContent-Length: 209715200\r\n\r\n", b" " * (200 << 20)),
    "a body without end": _sends_after(_ENDLESS, _CHUNK),
    "headers without end": _sends_after(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 999),
    "a packed bomb": _sends(_http("200 OK", b"\x1f\x8b" + b"\0" * 999, "Content-Encoding: gzip")),
}
"""What ends by itself, or by a bound of bytes."""
SLOW: Mapping[str, Answer] = {"a byte now and then": _trickle, "silence": lambda _peer: time.sleep(10_000)}
"""What only a deadline ends."""


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Serve in a process of its own and give the URL."""
    observer = socket.create_server(("127.0.0.1", 0), backlog=256)
    port = observer.getsockname()[1]
    child = os.fork()
    if child == 0:
        _serve(observer, answer)
    observer.close()
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _serve(observer: socket.socket, answer: Answer) -> None:
    while True:
        peer, _ = observer.accept()
        threading.Thread(target=_one, args=(peer, answer), daemon=True).start()


def _one(peer: socket.socket, answer: Answer) -> None:
    with suppress(OSError), peer:
        peer.recv(1 << 16)
        answer(peer)
