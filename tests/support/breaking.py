"""A relay between a client and a server that breaks a connection at a chosen point, once."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

Point = Literal["before it is sent", "before its answer", "in its answer"]


class Relay:
    """Passes bytes on until something with `marker` comes by; `broken` is set when the connection was cut for it."""

    def __init__(self, port: int, point: Point, marker: bytes) -> None:
        self.broken = threading.Event()
        self.port, self.point, self.marker = port, point, marker
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listening.accept()
                far = socket.create_connection(("127.0.0.1", self.port))
                for answers, one, other in ((False, near, far), (True, far, near)):
                    threading.Thread(target=self.pass_on, args=(answers, one, other), daemon=True).start()

    def pass_on(self, answers: bool, come_from: socket.socket, go_to: socket.socket) -> None:
        with suppress(OSError):
            while data := come_from.recv(1 << 16):
                place = data.find(self.marker)
                if place >= 0 and answers == (self.point != "before it is sent") and not self.broken.is_set():
                    if self.point == "in its answer":
                        go_to.sendall(data[: place + len(self.marker) // 2])
                    self.broken.set()
                    for end in (come_from, go_to):  # a reset, no farewell
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break
                go_to.sendall(data)
        for end in (come_from, go_to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()


@contextmanager
def breaking(address: str, point: Point, marker: bytes) -> Iterator[Relay]:
    """Relay to a server while the block runs."""
    relay = Relay(int(address.rpartition(":")[2]), point, marker)
    try:
        yield relay
    finally:
        relay.close()
