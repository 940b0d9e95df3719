"""Results that are no plain text, notifications, and a server's own requests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("mcp")

from mcp import types
from tests.environments.tools.test_mcp_http import wait_until_it_listens
from tests.support.ranks import free_port

from kapelle.environments.tools.contract import Lost, ToolFault
from kapelle.environments.tools.mcp import Mcp, McpTools
from kapelle.environments.tools.mcp_session import text_of

RICH = str(Path(__file__).with_name("rich_mcp_server.py"))
ONE = str(Path(__file__).with_name("mcp_server.py"))


@contextmanager
def opened(how: str) -> Iterator[McpTools]:
    """Yield the tools of the rich server: on its pipes, or over HTTP with or without `initialize`."""
    if how == "pipes":
        tools = Mcp(command=(sys.executable, RICH), call_s=120.0).open()
        yield tools
        tools.close()
        return
    port, nowhere = free_port(), subprocess.DEVNULL
    with subprocess.Popen([sys.executable, RICH, str(port), how], stdout=nowhere, stderr=nowhere) as process:
        try:
            wait_until_it_listens(port)
            tools = Mcp(url=f"http://localhost:{port}/mcp", local=True, call_s=120.0).open()
            yield tools
            tools.close()
        finally:
            process.kill()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "version"), [("http", "2025-11-25"), ("pipes", "2025-11-25"), ("modern", "2026-07-28")]
)
def test_every_content_becomes_text_and_requests_are_declined(how: str, version: str) -> None:
    with opened(how) as tools:
        sky = '{\n  "degrees": 21.5,\n  "sky": "clear"\n}'
        assert tools._call("weather", {}) == sky, "the text of the structure, once"
        assert tools._server is not None
        assert tools._server._session.protocol_version == version
        assert tools._call("structure", {}) == '{"sky": "grün", "degrees": [1, 2.5]}'
        assert tools._call("picture", {}) == "(image that is not text: image/png)\na cat"
        assert tools._call("sound", {}) == "(audio that is not text: audio/wav)"
        assert tools._call("resources", {}).splitlines() == [
            "(resource that was not read: a report, https://tools.example/report)",
            "what the notes say",
            "(resource that is not text: file:///cat.png)",
        ]
        offered = [tool.schema.name for tool in tools.tools]
        assert tools._call("tells", {}) == "done"
        for what in ("sampling", "elicitation", "roots"):
            assert tools._call("asks", {"what": what}).startswith("declined: ")
        with pytest.raises(ToolFault, match="Unknown tool") as unknown:
            tools._call("nope", {})
        assert not isinstance(unknown.value, Lost)
        connection = tools._server
        assert tools._call("weather", {}) == sky
        assert tools._server is connection
        assert [tool.schema.name for tool in tools.tools] == offered
        connection._limit_s = 0.5
        with pytest.raises(Lost, match=r"0\.5 s"):
            tools._call("hang", {})
        assert tools._call("weather", {}) == sky, "over a new connection"


def modern(mode: str = "modern") -> Mcp:
    return Mcp(command=(sys.executable, "-S", ONE, mode), call_s=20.0)


def test_a_server_without_initialize() -> None:
    tools = modern().open()
    assert tools._call("add", {"a": 2, "b": 3}) == "5"
    assert tools._server is not None
    assert tools._server._session.protocol_version == "2026-07-28"
    with pytest.raises(ToolFault, match="elicitation/create") as asked:
        tools._call("hang", {})
    assert not isinstance(asked.value, Lost)
    assert tools._call("count", {}) == "3", "the connection continues"
    tools.close()


def test_an_unknown_content_keeps_the_connection() -> None:
    tools = modern("hologram").open()
    with pytest.raises(ToolFault, match="protocol") as unread:
        tools._call("add", {"a": 2, "b": 3})
    assert not isinstance(unread.value, Lost)
    assert tools._call("count", {}) == "2"
    tools.close()


def test_texts_precede_structure() -> None:
    text = types.TextContent(type="text", text="21 degrees")
    assert text_of(types.CallToolResult(content=[text], structured_content={"degrees": 21})) == "21 degrees"
    assert text_of(types.CallToolResult(content=[], structured_content={"degrees": 21})) == '{"degrees": 21}'
    assert text_of(types.CallToolResult(content=[])) == "(nothing)"
