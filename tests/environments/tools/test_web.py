"""Requests on behalf of an agent: which addresses are allowed, and what a server's answer may cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kapelle.environments.tools.web import WebFault, any_address, fetch_json, is_public
from kapelle.runtime.http import MAX_BYTES


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


PRIVATE = """
    127.0.0.1 127.8.8.8 0.0.0.0 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 192.0.2.1 198.18.0.1
    224.0.0.1 240.0.0.1 255.255.255.255 :: ::1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 64:ff9b::7f00:1
    64:ff9b::a9fe:a9fe 2002:7f00:1:: fe80::1 fe80::1%eth0 fc00::1 fec0::1 fd00:ec2::254 ff02::1 2001:db8::1 3fff::1
    168.63.129.16 192.0.0.192 192.88.99.1 ::7f00:1 64:ff9b:1::7f00:1
"""


def test_other_addresses_are_not_public() -> None:
    assert [address for address in PRIVATE.split() if is_public(address)] == []


@pytest.mark.parametrize("addresses", [[], ["10.0.0.1"], ["8.8.8.8", "10.0.0.1"]])
def test_every_address_of_a_name_is_checked(addresses: list[str]) -> None:
    with pytest.raises(WebFault, match="not public"):
        fetch_json("http://example.org/", {}, resolve=lambda host, port: addresses)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/", "http://2130706433/", "http://0x7f.1/", "http://localhost/", "http://[::ffff:7f00:1]/"],
)  # fmt: skip
def test_no_spelling_of_a_private_address_is_allowed(url: str) -> None:
    with pytest.raises(WebFault, match=r"not public|not known"):
        fetch_json(url, {})


def test_an_unknown_name_and_another_scheme_fail() -> None:
    with pytest.raises(WebFault, match="not known"):
        fetch_json("http://nowhere.invalid/", {})
    with pytest.raises(WebFault, match="failed"):
        fetch_json("ftp://127.0.0.1/", {}, allowed=any_address)


class Pages(BaseHTTPRequestHandler):
    """Pages that misbehave by name."""

    seen: list[tuple[str, str]] = []  # noqa: RUF012 (a record of this test's server)

    def do_GET(self) -> None:
        self.seen.append((self.path, str(self.headers["Host"])))
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/page")
            self.end_headers()
            return
        if self.path == "/slow-headers":
            self._drip(b"HTTP/1.1 200 OK\r\nX: ")
            return
        self.send_response(500 if self.path == "/broken" else 200)
        if self.path == "/compressed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if self.path == "/large":
            self.wfile.write(b"x" * (MAX_BYTES + 1))
        elif self.path == "/slow":
            self._drip(b"x")
        elif self.path == "/text":
            self.wfile.write(b"{")
        else:
            self.wfile.write(b'{"path": "page"}')

    def _drip(self, data: bytes) -> None:
        for k in range(1200):
            try:
                self.wfile.write(data[k : k + 1] or b"x")
                time.sleep(0.05)
            except OSError:
                return

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/moved", "302"),
        ("/broken", "500"),
        ("/compressed", "compressed"),
        ("/large", "bytes"),
        ("/text", "JSON"),
        ("/slow", "not complete"),
        ("/slow-headers", "not complete"),
    ],
)
def test_an_invalid_answer_fails(port: int, path: str, why: str) -> None:
    started = time.monotonic()
    limit = 0.3 if path.startswith("/slow") else 30.0
    with pytest.raises(WebFault, match=why):
        fetch_json(f"http://127.0.0.1:{port}{path}", {}, allowed=any_address, timeout_s=limit)
    assert time.monotonic() - started < 45.0, "the slow pages take 60 s"


@pytest.mark.parametrize("host", ["rebinding.test", "[2001:db8::1]"])
def test_the_connection_goes_to_the_checked_address_under_the_name_of_the_host(port: int, host: str) -> None:
    answers = iter([["127.0.0.1"], ["127.0.0.2"]])
    url = f"http://{host}:{port}/page"
    found = fetch_json(url, {}, allowed=lambda each: each == "127.0.0.1", resolve=lambda *_: next(answers))
    assert found == {"path": "page"}
    assert Pages.seen[-1] == ("/page", f"{host}:{port}")
    assert next(answers) == ["127.0.0.2"], "the name is resolved once"
