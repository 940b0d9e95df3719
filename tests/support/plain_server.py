"""A server that answers with a status and nothing else."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class PlainServer(http.server.ThreadingHTTPServer):
    """Knows the paths that it is asked for, each with the key that came along."""

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.status = status
        self.asked: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(http.server.BaseHTTPRequestHandler):
    server: PlainServer

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["authorization"]))
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering(status: int) -> Iterator[PlainServer]:
    """Serve while the block runs."""
    with PlainServer(status) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
