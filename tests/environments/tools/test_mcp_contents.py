"""What agents read of results that are no plain text, and what becomes of a server that tells much or asks back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mcp import types
from tests.environments.tools.test_mcp_http import _wait_until_it_listens
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
            _wait_until_it_listens(port)
            tools = Mcp(url=f"http://localhost:{port}/mcp", local=True, call_s=120.0).open()
            yield tools
            tools.close()
        finally:
            process.kill()


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "version"), [("pipes", "2025-11-25"), ("http", "2025-11-25"), ("modern", "2026-07-28")]
)
def test_every_kind_of_answer_is_read_and_every_question_declined(how: str, version: str) -> None:
    with opened(how) as tools:
        sky = '{\n  "degrees": 21.5,\n  "sky": "clear"\n}'
        assert tools._call("weather", {}) == sky, "the text that stands for the structure, once"
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
            said = tools._call("asks", {"what": what})
            assert said.startswith("declined: "), said
        with pytest.raises(ToolFault, match="Unknown tool") as unknown:
            tools._call("nope", {})
        assert not isinstance(unknown.value, Lost)
        conversation = tools._server
        assert tools._call("weather", {}) == sky
        assert tools._server is conversation, "nothing of this has ended the conversation"
        assert [tool.schema.name for tool in tools.tools] == offered
        conversation._limit_s = 0.5
        with pytest.raises(Lost, match=r"did not answer within 0.5 s"):
            tools._call("hang", {})
        assert tools._call("weather", {}) == sky, "in a conversation of its own"


def modern(mode: str = "modern") -> Mcp:
    return Mcp(command=(sys.executable, "-S", ONE, mode), call_s=20.0)


def test_a_server_without_initialize_is_greeted_as_it_knows_it() -> None:
    tools = modern().open()
    assert tools._call("add", {"a": 2, "b": 3}) == "5"
    assert tools._server is not None
    assert tools._server._session.protocol_version == "2026-07-28"
    with pytest.raises(ToolFault, match=r"asks back before it answers \(elicitation/create\)") as asked:
        tools._call("hang", {})
    assert not isinstance(asked.value, Lost)
    assert tools._call("count", {}) == "3", "the conversation goes on"
    tools.close()


def test_an_answer_of_an_unknown_kind_keeps_the_conversation() -> None:
    tools = modern("hologram").open()
    with pytest.raises(ToolFault, match="no result of this protocol") as unread:
        tools._call("add", {"a": 2, "b": 3})
    assert not isinstance(unread.value, Lost)
    assert tools._call("count", {}) == "2"
    tools.close()


def test_texts_go_before_structure_and_nothing_is_named() -> None:
    said = types.TextContent(type="text", text="21 degrees")
    assert text_of(types.CallToolResult(content=[said], structured_content={"degrees": 21})) == "21 degrees"
    assert text_of(types.CallToolResult(content=[], structured_content={"degrees": 21})) == '{"degrees": 21}'
    assert text_of(types.CallToolResult(content=[])) == "(nothing)"
