from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import SplitResult

import pytest

from kapelle.environments.tools import web
from kapelle.environments.tools.web import MAX_HOPS, WebFault, any_address, fetch, fetch_json, is_public


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",  # noqa: S104 (one that is refused)
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fec0::1",
        "fd00:ec2::254",
        "ff02::1",
        "2001:db8::1",
        "3fff::1",
        "168.63.129.16",
        "192.0.0.192",
        "192.88.99.1",
        "::7f00:1",
        "64:ff9b:1::7f00:1",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)
    with pytest.raises(WebFault, match="not public"):
        fetch("http://example.org/", {}, resolve=lambda host, port: [address])
    with pytest.raises(WebFault, match="not public"):
        fetch("http://example.org/", {}, resolve=lambda host, port: ["8.8.8.8", address])


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///etc/passwd", "only http and https"),
        ("ftp://example.org/", "only http and https"),
        ("gopher://example.org/", "only http and https"),
        ("//example.org/", "only http and https"),
        ("http:///x", "names no host"),
        ("http://user@example.org/", "or a user"),
        ("http://user:pass@example.org/", "or a user"),
        ("http://example.org:0/", "names no host"),
        ("http://example.org:99999/", "cannot be read"),
        ("http://[::1/", "cannot be read"),
        ("http://example.org/a b", "control characters"),
        ("http://example.org/\r\nHost: other", "control characters"),
        ("http://127.0.0.1/", "not public"),
        ("http://2130706433/", "not public"),
        ("http://0x7f.1/", "not public"),
        ("http://localhost/", "not public"),
        ("http://[::ffff:127.0.0.1]/", "not public"),
    ],
)
def test_addresses_that_are_refused(url: str, why: str) -> None:
    with pytest.raises(WebFault, match=why):
        fetch(url, {})


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(WebFault, match=r"the host 'nowhere.invalid' is not known"):
        fetch("http://nowhere.invalid/", {})


class Pages(BaseHTTPRequestHandler):
    """Pages that try something."""

    seen: list[tuple[str, str | None]] = []  # noqa: RUF012 (a record of this test's server)
    host = ""
    """By which the last request named the server."""

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        Pages.host = str(self.headers["Host"])
        port = Pages.host.rpartition(":")[2]
        moves = {
            "/elsewhere": f"http://127.0.0.2:{port}/page",
            "/file": "file:///etc/passwd",
            "/loop": "/loop",
            "/near": "/page?x=1",
            "/nowhere": "",
            "/no-address": "http://[",
        }
        if self.path in moves:
            self.send_response(302)
            self.send_header("Location", moves[self.path])
            self.end_headers()
            return
        if self.path == "/slow-headers":
            self._drip(b"HTTP/1.1 200 OK\r\nX: ")
            return
        self.send_response(500 if self.path == "/broken" else 200)
        if self.path == "/squeezed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if self.path == "/large":
            self.wfile.write(b"x" * 3000)
        elif self.path == "/slow":
            self._drip(b"x")
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
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    Pages.seen.clear()
    with ThreadingHTTPServer(("0.0.0.0", 0), Pages) as running:  # noqa: S104 (127.0.0.1 and 127.0.0.2)
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def first_only(address: str) -> bool:
    return address == "127.0.0.1"


def test_a_page_is_fetched_and_redirections_followed(server: str) -> None:
    assert fetch(f"{server}/near", {}, allowed=first_only).body == b'{"path": "page"}'
    assert [path for path, _ in Pages.seen] == ["/near", "/page?x=1"]
    assert fetch_json(f"{server}/page", {}, local=True) == {"path": "page"}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/elsewhere", "not public"),
        ("/file", "only http and https"),
        ("/loop", f"more than {MAX_HOPS} times"),
        ("/nowhere", f"more than {MAX_HOPS} times"),
        ("/no-address", "cannot be read"),
        ("/broken", "answered 500"),
        ("/squeezed", "compressed"),
        ("/large", "more than 1,000 bytes"),
        ("/slow", "took too long|failed"),
        ("/slow-headers", "took too long|failed"),
    ],
)
def test_what_a_server_may_not_do(server: str, path: str, why: str) -> None:
    started = time.monotonic()
    limit_s = 0.5 if path.startswith("/slow") else 30.0
    with pytest.raises(WebFault, match=why):
        fetch(f"{server}{path}", {}, allowed=first_only, max_bytes=1000, timeout_s=limit_s)
    assert time.monotonic() - started < 45.0, "the slow page alone would take 60 s"


def test_an_address_of_ipv6_is_named_in_brackets(server: str) -> None:
    port = server.rpartition(":")[2]
    fetch(f"http://[2001:db8::1]:{port}/page", {}, allowed=first_only, resolve=lambda *_: ["127.0.0.1"])
    assert Pages.host == f"[2001:db8::1]:{port}"


def test_a_key_goes_to_the_first_host_alone(server: str) -> None:
    fetch(f"{server}/elsewhere", {"Authorization": "secret"}, allowed=any_address)
    assert Pages.seen == [("/elsewhere", "secret"), ("/page", None)]


def test_a_key_goes_to_no_other_scheme_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str, bool]] = []
    moves = {
        "https://one.test/a": "http://one.test/b",
        "http://one.test/b": "https://one.test:8443/c",
        "https://one.test:8443/c": "https://ONE.test:443/d",
    }

    def hop(parts: SplitResult, headers: Mapping[str, str], *_: object) -> tuple[str | None, bytes]:
        sent.append((parts.scheme, parts.netloc, bool(headers)))
        return moves.get(parts.geturl()), b""

    monkeypatch.setattr(web, "_one_hop", hop)
    fetch("https://one.test/a", {"Authorization": "secret"})
    assert sent == [
        ("https", "one.test", True),
        ("http", "one.test", False),
        ("https", "one.test:8443", False),
        # Back at the first one, but where another one has sent it.
        ("https", "ONE.test:443", False),
    ]


def test_a_key_stays_with_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bool] = []

    def hop(parts: SplitResult, headers: Mapping[str, str], *_: object) -> tuple[str | None, bytes]:
        sent.append(bool(headers))
        return {"/a": "/b", "/b": "https://ONE.test:443/c"}.get(parts.path), b""

    monkeypatch.setattr(web, "_one_hop", hop)
    fetch("https://one.test/a", {"Authorization": "secret"})
    assert sent == [True, True, True]


def test_a_name_that_changes_its_mind_leads_where_it_was_checked(server: str) -> None:
    port = int(server.rpartition(":")[2])
    answers = iter([["127.0.0.1"], ["127.0.0.2"]])
    fetch(
        f"http://rebinding.test:{port}/page", {}, allowed=first_only, resolve=lambda host, port: next(answers)
    )
    assert len(Pages.seen) == 1
    assert next(answers) == ["127.0.0.2"], "it was asked once"
