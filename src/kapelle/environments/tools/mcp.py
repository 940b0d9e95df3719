"""Tools of an MCP server that speaks JSON-RPC on standard input and output (Model Context Protocol, 2025-06-18).

A minimal client: `initialize`, `tools/list`, `tools/call`, and `ping` from the server; resources, prompts and sampling are
not offered. Messages are one line each and bounded; a server that does not answer in time is ended.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kapelle.environments.tools.contract import Tool, ToolFault, ToolSchema
from kapelle.errors import ConfigError
from kapelle.runtime.awake import AwakeClock, wait_readable
from kapelle.settings.base import FREE, Settings
from kapelle.types import Json

PROTOCOL = "2025-06-18"
MAX_MESSAGE = 1 << 20
"""Bytes of one message."""
MAX_PAGES = 16
"""Pages of a list of tools."""
_UNKNOWN_METHOD = -32601


class Mcp(Settings):
    """The tools of one server program; every agent of every episode talks to a process of its own."""

    tool: Literal["mcp"] = "mcp"
    descriptors: ClassVar[int] = 2
    """Of one server: two pipes."""
    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments; it runs with this process's rights, outside any sandbox."""
    env: tuple[str, ...] = ()
    """Names of environment variables that it gets besides PATH, HOME and LANG."""
    call_s: Annotated[float, FREE] = Field(30.0, gt=0.0)
    """Seconds within which it must answer."""

    def check(self) -> None:
        """Start it once and ask for its tools; ConfigError when that fails."""
        self.schemas()

    def schemas(self) -> tuple[ToolSchema, ...]:
        """Return what the server offers, asked once for each process."""
        return _schemas(self)

    def open(self) -> McpTools:
        """Return the server's tools; it starts with the first call."""
        return McpTools(self)


@functools.lru_cache(maxsize=32)
def _schemas(settings: Mcp) -> tuple[ToolSchema, ...]:
    server: Connection | None = None
    try:
        server = Connection(settings)
        return server.tools()
    except ToolFault as fault:
        raise ConfigError(f"The MCP server `{' '.join(settings.command)}` offers no tools: {fault}") from None
    finally:
        if server is not None:
            server.close()


class McpTools:
    """One process of a server, started when first called, and again after it was lost."""

    def __init__(self, settings: Mcp) -> None:
        self._settings = settings
        self._server: Connection | None = None
        self.tools = tuple(
            Tool(schema, functools.partial(self._call, schema.name)) for schema in settings.schemas()
        )

    def _call(self, name: str, arguments: Mapping[str, Json]) -> str:
        if self._server is None:
            self._server = Connection(self._settings)
        try:
            return self._server.call(name, arguments)
        except Lost:
            self.close()
            raise

    def close(self) -> None:
        """End the process."""
        if self._server is not None:
            self._server.close()
            self._server = None


class Lost(ToolFault):
    """The server cannot be spoken to any more."""


class Connection:
    """A conversation with a running server."""

    def __init__(self, settings: Mcp) -> None:
        """Start the server and greet it; Lost when it does not answer."""
        self._limit_s = settings.call_s
        self._asked = 0
        self._unread = bytearray()
        passed = {
            name: os.environ[name] for name in ("PATH", "HOME", "LANG", *settings.env) if name in os.environ
        }
        try:
            self._process = subprocess.Popen(  # noqa: S603 (the program that the settings name)
                settings.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=passed,
                start_new_session=True,
            )
        except OSError as error:
            raise Lost(f"it cannot be started ({error.strerror}).") from None
        try:
            greeting = {"protocolVersion": PROTOCOL, "capabilities": {}}
            self._ask("initialize", {**greeting, "clientInfo": {"name": "kapelle", "version": "0"}})
            self._send({"method": "notifications/initialized"})
        except BaseException:
            self.close()
            raise

    def tools(self) -> tuple[ToolSchema, ...]:
        """Return what the server offers; ToolFault for something that is no list of tools."""
        found: list[ToolSchema] = []
        cursor: dict[str, Json] = {}
        for _ in range(MAX_PAGES):
            page = self._ask("tools/list", cursor)
            if not isinstance(page.get("tools"), list):
                raise ToolFault("its list of tools is none.")
            found += map(_schema, page["tools"])
            if not page.get("nextCursor"):
                break
            cursor = {"cursor": page["nextCursor"]}
        return tuple(found)

    def call(self, name: str, arguments: Mapping[str, Json]) -> str:
        """Return the text of a tool's result; ToolFault when the result reports a failure, Lost when there is no answer."""
        result = self._ask("tools/call", {"name": name, "arguments": dict(arguments)})
        content = result.get("content")
        parts = content if isinstance(content, list) else []
        text = "\n".join(_text(part) for part in parts) or "(nothing)"
        if result.get("isError"):
            raise ToolFault(text)
        return text

    def _ask(self, method: str, parameters: Mapping[str, Json]) -> Mapping[str, Json]:
        self._asked += 1
        self._send({"id": self._asked, "method": method, "params": dict(parameters)})
        clock = AwakeClock()
        while True:
            message = self._receive(clock)
            if "method" in message and "id" in message:
                self._answer(message)
            elif message.get("id") == self._asked and "method" not in message:
                break
        if "error" in message:
            error = message["error"]
            said = error.get("message") if isinstance(error, Mapping) else error
            raise ToolFault(f"The server refused: {said}"[:1000])
        result = message.get("result")
        if not isinstance(result, Mapping):
            raise Lost("The server answered with no result.")
        return result

    def _answer(self, request: Mapping[str, Json]) -> None:
        if request["method"] == "ping":
            self._send({"id": request["id"], "result": {}})
        else:
            fault = {"code": _UNKNOWN_METHOD, "message": "not offered"}
            self._send({"id": request["id"], "error": fault})

    def _send(self, message: Mapping[str, Json]) -> None:
        assert self._process.stdin is not None, "opened as a pipe"
        data = json.dumps({"jsonrpc": "2.0", **message}, default=str).encode() + b"\n"
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError:
            raise Lost("The server has ended.") from None

    def _receive(self, clock: AwakeClock) -> Mapping[str, Json]:
        assert self._process.stdout is not None, "opened as a pipe"
        while b"\n" not in self._unread:
            if not wait_readable(self._process.stdout, clock, self._limit_s):
                raise Lost(f"The server did not answer within {self._limit_s:g} s.")
            part = os.read(self._process.stdout.fileno(), 65536)
            if not part:
                raise Lost("The server has ended.")
            self._unread += part
            if len(self._unread) > MAX_MESSAGE:
                raise Lost(f"The server sent more than {MAX_MESSAGE:,} bytes at once.")
        line, _, rest = bytes(self._unread).partition(b"\n")
        self._unread = bytearray(rest)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise Lost("The server sent something that is no message.")
        return message

    def close(self) -> None:
        """End the server and everything that it started in its group."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.poll()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


def _schema(offered: Json) -> ToolSchema:
    if not isinstance(offered, Mapping) or not isinstance(offered.get("name"), str):
        raise ToolFault("one of its tools has no name.")
    parameters = offered.get("inputSchema")
    if not isinstance(parameters, Mapping):
        raise ToolFault(f"its tool '{offered['name']}' has no schema.")
    return ToolSchema(offered["name"], str(offered.get("description", "")), dict(parameters))


def _text(part: Json) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        return str(part.get("text", ""))
    kind = part.get("type") if isinstance(part, Mapping) else None
    return f"({kind or 'something'} that is not text)"
