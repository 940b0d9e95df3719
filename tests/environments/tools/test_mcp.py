from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.environments.tools.mcp_server import TWO_NUMBERS
from tests.workflows.stage import lines, play

pytest.importorskip("mcp")

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.tool_questions import Tools
from kapelle.environments.tools.contract import Lost, ToolFault
from kapelle.environments.tools.mcp import Mcp, McpTools, connected
from kapelle.environments.tools.mcp_session import Pipes
from kapelle.errors import ConfigError
from kapelle.types import Json, Task
from kapelle.workflows.tool_use import ToolUse

SERVER = str(Path(__file__).parent / "mcp_server.py")
Call = Callable[[Mapping[str, Json]], str]


def settings(mode: str = "", call_s: float = 10.0) -> Mcp:
    return Mcp(command=(sys.executable, "-S", SERVER, mode), call_s=call_s)


@pytest.fixture
def opened() -> Iterator[McpTools]:
    tools = settings(call_s=20.0).open()
    yield tools
    tools.close()


def by_name(opened: McpTools) -> dict[str, Call]:
    return {tool.schema.name: tool.call for tool in opened.tools}


def test_tools_of_every_page_are_offered() -> None:
    schemas = {schema.name: schema for schema in settings().schemas()}
    assert list(schemas)[:5] == ["add", "count", "fail", "picture", "hang"]
    assert schemas["add"].as_json() == {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": TWO_NUMBERS,
    }


def test_results_are_texts_and_the_process_continues(opened: McpTools) -> None:
    tools = by_name(opened)
    assert opened._server is None, "the first call starts it"
    assert tools["add"]({"a": 2, "b": 3}) == "5"
    assert tools["count"]({}) == "2"
    assert tools["picture"]({}) == "(image that is not text: image/png)\na cat"


@pytest.mark.parametrize(
    ("name", "why", "lost"),
    [
        ("fail", "^it does not work$", False),
        ("unknown", "no", False),
        ("hang", r"0\.2 s", True),
        ("die", "has ended", True),
        ("flood", "1,048,576 bytes", True),
        ("babble", "no", False),
    ],
)
def test_a_failure_is_a_fault_and_the_next_call_works(
    opened: McpTools, name: str, why: str, lost: bool
) -> None:
    tools = by_name(opened)
    tools["count"]({})
    if name == "hang":
        assert opened._server is not None
        opened._server._limit_s = 0.2
    with pytest.raises(ToolFault, match=why):
        opened._call(name, {})
    assert tools["count"]({}) == ("1" if lost else "3")


def test_a_server_gets_only_the_named_variables(opened: McpTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAPELLE_TEST_SECRET", "token")
    assert "KAPELLE_TEST_SECRET" not in by_name(opened)["environment"]({})
    named = Mcp(command=settings().command, env=("KAPELLE_TEST_SECRET",)).open()
    assert "KAPELLE_TEST_SECRET" in by_name(named)["environment"]({})
    named.close()


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (Mcp(command=("no-such-program",)), "started"),
        (Mcp(command=(sys.executable, "-c", "")), "has ended"),
        (settings("silent", call_s=0.3), r"0\.3 s"),
        (settings("no greeting"), "initialize"),
        (settings("no list"), "list of tools"),
    ],
)
def test_a_server_without_tools_stops_the_run(server: Mcp, why: str) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match=why):
        server.check()
    assert time.monotonic() - started < 45.0, "a silent server sleeps for a minute"


def test_the_error_has_the_end_of_stderr() -> None:
    program = "import sys; sys.stderr.write('much ' * 9999); sys.exit('no API key is set')"
    with pytest.raises(ConfigError, match=r"no API key is set$") as caught:
        Mcp(command=(sys.executable, "-c", program)).check()
    assert len(str(caught.value)) < 3_000


def test_invalid_lines_are_logged_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """Banners and prints on standard output are frequent."""
    server = settings("stray")
    assert [schema.name for schema in server.schemas()][:2] == ["add", "count"]
    opened = server.open()
    assert opened._call("add", {"a": 2, "b": 3}) == "5"
    opened.close()
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["Listening."]


def test_an_endless_list_ends() -> None:
    assert len(settings("endless").schemas()) < 200


def test_a_server_with_too_many_messages_is_ended() -> None:
    opened = McpTools(settings("chatty"))
    with pytest.raises(Lost, match="10,000 messages"):
        opened._call("count", {})
    assert opened._server is None


def test_a_server_that_reads_nothing_is_ended() -> None:
    server = connected(settings("deaf", call_s=10.0))
    server._limit_s = 0.3
    with pytest.raises(Lost, match=r"0\.3 s"):
        server.call("count", {"much": "x" * (1 << 20)})
    server.close()


def test_a_command_or_a_url_is_required() -> None:
    for given in ({}, {"command": ("serve",), "url": "https://tools.example"}):
        with pytest.raises(ValueError, match="`command` or a `url`"):
            Mcp.model_validate(given)


def test_closing_ends_the_process(opened: McpTools) -> None:
    by_name(opened)["count"]({})
    assert opened._server is not None
    assert isinstance(opened._server._transport, Pipes)
    number = opened._server._transport.program.process.pid
    opened.close()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


async def test_agents_call_the_tools() -> None:
    environment = Tools(questions=Arithmetic(), tools=(settings(),))
    environment.check(["a", "b"])
    ask = '<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>'
    scripts = {"a": lines(ask, ask, "132"), "b": lines(ask, "132")}
    task = Task("train-0", "47+85", {"answer": 132})
    [episode] = await play(environment, ToolUse(), ["a", "b"], scripts, task)
    new_messages = {
        name: [turn.new_messages[0].content for turn in episode.by(name)][1:] for name in ("a", "b")
    }
    assert new_messages == {"a": ["1", "2"], "b": ["1"]}, "each agent has its own process"
    assert episode.rewards == {"a": 1.0, "b": 1.0}
