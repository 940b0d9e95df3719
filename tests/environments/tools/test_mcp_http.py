"""MCP servers on the network that misbehave; `test_mcp_contents` has one of the package."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

pytest.importorskip("mcp")

from kapelle.environments.tools import mcp_session as mcp_http
from kapelle.environments.tools.contract import Lost
from kapelle.environments.tools.mcp import Mcp, McpTools, connected
from kapelle.environments.tools.mcp_session import BoundedTransport, client
from kapelle.environments.tools.web import is_public
from kapelle.errors import ConfigError

TOOLS = [{"name": "add", "inputSchema": {"type": "object"}}]
GREETING = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "serverInfo": {"name": "test", "version": "1"},
}


class Hostile(BaseHTTPRequestHandler):
    """Answers by its path; records its requests."""

    elsewhere = ""
    seen: list[tuple[str, str | None, str | None]]
    over: threading.Event
    calls: int

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, request.get("method"), self.headers.get("Authorization")))
        how = self.path[1:]
        if how == "redirect":
            self.send_response(307)
            self.send_header("Location", f"{self.elsewhere}/honest")
            self.end_headers()
        elif how == "silent":
            self.over.wait(60)
        elif how == "dies":
            self._send(b'{"jsonrpc"', length=1000)
        elif how == "flood":
            self._send(b" " * (3 << 20))
        elif how == "events":
            self._send((b": nothing" * 1000 + b"\n\n") * 300, kind="text/event-stream")
        elif how == "babble":
            self._send(b"this is not a message")
        elif how == "compressed":
            self._send(b"{}", encoding="gzip")
        elif "id" not in request:
            self.send_response(202)
            self.end_headers()
        else:
            self._answer(request)

    def do_DELETE(self) -> None:
        self.seen.append((self.path, "goodbye", self.headers.get("Authorization")))
        if self.path == "/honest":
            self._send(b"", length=1000)  # and never the rest
            self.over.wait(60)
        else:
            self.over.wait(60)

    def _answer(self, request: dict[str, object]) -> None:
        type(self).calls += request["method"] == "tools/call"
        if request["method"] == "tools/call" and self.calls == 1:
            self.send_response(404)
            self.end_headers()
            return
        results = {
            "initialize": GREETING,
            "tools/list": {"tools": TOOLS},
            "tools/call": {"content": [{"type": "text", "text": "5"}]},
        }
        answer = {"jsonrpc": "2.0", "id": request["id"], "result": results[str(request["method"])]}
        self._send(json.dumps(answer).encode(), session=[("Mcp-Session-Id", "one")])

    def _send(
        self,
        body: bytes,
        *,
        length: int | None = None,
        kind: str = "application/json",
        encoding: str = "identity",
        session: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.send_response(200)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Encoding", encoding),
            ("Content-Length", str(length or len(body))),
            *session,
        ):
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            return

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the name that it has)
        """Print nothing."""


@pytest.fixture
def hostile() -> Iterator[tuple[str, type[Hostile]]]:
    class Here(Hostile):
        seen, over, calls = [], threading.Event(), 0

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Here) as server,
        ThreadingHTTPServer(("127.0.0.1", 0), Here) as other,
    ):
        Here.elsewhere = f"http://127.0.0.1:{other.server_port}"
        threads = [threading.Thread(target=each.serve_forever, args=(0.02,)) for each in (server, other)]
        for thread in threads:
            thread.start()
        yield f"http://127.0.0.1:{server.server_port}", Here
        Here.over.set()
        for each, thread in zip((server, other), threads, strict=True):
            each.shutdown()
            each.server_close()
            thread.join()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("redirect", "not followed"),
        ("silent", r"0\.3 s"),
        ("dies", r"failed \(RemoteProtocolError\)|ended without|has ended"),
        ("flood", "1,048,576 bytes"),
        ("events", "1,048,576 bytes|Failed to parse SSE"),
        ("babble", "Failed to parse JSON"),
        ("compressed", "compressed"),
    ],
)
def test_an_invalid_answer_stops_the_run(hostile: tuple[str, type[Hostile]], how: str, why: str) -> None:
    address, here = hostile
    with pytest.raises(ConfigError, match=why):
        Mcp(url=f"{address}/{how}", local=True, call_s=0.3 if how == "silent" else 60.0).check()
    assert [path for path, _, _ in here.seen] == [f"/{how}"], "one request to one server"


def test_every_request_has_the_token_and_a_new_session_follows_a_lost_one(
    hostile: tuple[str, type[Hostile]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, here = hostile
    monkeypatch.setenv("KAPELLE_TEST_TOKEN", "abc")
    opened = McpTools(Mcp(url=f"{address}/honest", local=True, key_env="KAPELLE_TEST_TOKEN", call_s=60.0))
    with pytest.raises(Lost, match="404"):
        opened._call("add", {})
    assert opened._call("add", {}) == "5"
    opened.close()
    assert {token for _, _, token in here.seen} == {"Bearer abc"}
    assert [method for _, method, _ in here.seen].count("initialize") == 3, (
        "for the list of tools, and two sessions"
    )


@pytest.mark.parametrize("how", ["honest", "hangs at goodbye"])
def test_a_session_ends_without_an_answer_of_the_server(
    hostile: tuple[str, type[Hostile]], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, here = hostile
    monkeypatch.setattr(mcp_http, "GOODBYE_S", 0.2)
    connection = connected(Mcp(url=f"{address}/{quote(how)}", local=True, call_s=60.0))
    connection.close()
    assert connection._ended.is_set(), "it ended in time"
    assert [method for _, method, _ in here.seen].count("goodbye") == 1


def test_headers_come_from_variables(
    hostile: tuple[str, type[Hostile]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, here = hostile
    monkeypatch.setenv("KAPELLE_TEST_TOKEN", "Basic YWJj")
    settings: dict[str, Any] = {"url": f"{address}/honest", "local": True}
    Mcp(**settings, headers_env={"authorization": "KAPELLE_TEST_TOKEN"}).check()
    assert {token for _, _, token in here.seen} == {"Basic YWJj"}
    for name in ("Mcp-Session-Id", "host", "a b"):
        with pytest.raises(ValueError, match="headers_env"):
            Mcp(**settings, headers_env={name: "KAPELLE_TEST_TOKEN"})
    with pytest.raises(ValueError, match="headers_env"):
        Mcp(**settings, key_env="A", headers_env={"AUTHORIZATION": "B"})
    with pytest.raises(ValueError, match="`headers_env` of the tool `mcp` needs a `url`"):
        Mcp(command=("serve",), headers_env={"X-Key": "KAPELLE_TEST_TOKEN"})
    monkeypatch.setenv("KAPELLE_TEST_TOKEN", "abc\r\nX-More: yes")
    with pytest.raises(ConfigError, match="KAPELLE_TEST_TOKEN"):
        Mcp(**settings, headers_env={"X-Key": "KAPELLE_TEST_TOKEN"}).check()


def test_no_token_is_sent_unencrypted_or_to_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAPELLE_TEST_TOKEN", "abc")
    with pytest.raises(ConfigError, match="KAPELLE_TEST_TOKEN"):
        Mcp(url="http://tools.example", key_env="KAPELLE_TEST_TOKEN").check()
    with pytest.raises(ValueError, match="key_env"):
        Mcp(command=("serve",), key_env="KAPELLE_TEST_TOKEN")
    with pytest.raises(ConfigError, match="KAPELLE_TEST_NONE"):
        Mcp(url="https://tools.example", key_env="KAPELLE_TEST_NONE").check()


def test_a_private_address_needs_a_setting(hostile: tuple[str, type[Hostile]]) -> None:
    address, here = hostile
    with pytest.raises(ConfigError, match="not public"):
        Mcp(url=f"{address}/honest").check()
    assert here.seen == []


async def test_every_address_of_a_name_is_checked() -> None:
    carrier = BoundedTransport(is_public, lambda host, port: ["93.184.216.34", "10.0.0.1"])
    async with client(carrier, None) as asking:
        with pytest.raises(httpx2.TransportError, match="not public"):
            await asking.post("http://tools.example/mcp")
    assert carrier.fault is not None


def wait_until_it_listens(port: int) -> None:
    until = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert time.monotonic() < until, "it does not start"
            time.sleep(0.05)
        else:
            return
