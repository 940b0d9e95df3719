"""Tools of an MCP server (Model Context Protocol): a program of one's own, or a server on the network.

The conversation is `mcp_session`'s, on the official package (the extra `mcp`); resources, prompts and sampling are
unsupported. Messages are bounded, and a server that misses its deadline is ended.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from kapelle.environment import StartsProgram
from kapelle.environments.tools.contract import Lost, Tool, Toolbox, ToolFault, ToolSchema, ToolSettings
from kapelle.errors import AbsentPackage, ConfigError
from kapelle.runtime.credentials import bearer, check_private
from kapelle.settings.base import FREE, open_address
from kapelle.types import Json

if TYPE_CHECKING:
    from kapelle.environments.tools.mcp_session import McpConnection

LOG = logging.getLogger(__name__)
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?|")
_OURS = frozenset(
    [
        "accept",
        "accept-encoding",
        "connection",
        "content-length",
        "content-type",
        "cookie",
        "host",
        "last-event-id",
        "te",
        "transfer-encoding",
        "upgrade",
    ]
)
"""Headers that carry the conversation itself, as all do whose names begin with `mcp-`."""


class Mcp(ToolSettings, StartsProgram):
    """The tools of one server; every agent of every episode has a process, or a session, of its own."""

    tool: Literal["mcp"] = "mcp"
    descriptors: ClassVar[int] = 3
    """Of one server: two pipes and a file, or one connection."""
    command: tuple[str, ...] = ()
    """The program and its arguments; it runs with this process's rights, outside any sandbox."""
    url: str | None = None
    """In place of a command: the address of a server that speaks streamable HTTP."""
    local: bool = False
    """True: `url` may lead to this machine or its network."""
    key_env: Annotated[str | None, FREE] = None
    """Environment variable with a token for `url`, sent as a bearer token to that server alone."""
    headers_env: Annotated[Mapping[str, str], FREE] = Field(default_factory=dict)
    """Further headers for `url` alone, each with the environment variable that holds it: `{X-API-Key: SEARCH_KEY}`."""
    env: tuple[str, ...] = ()
    """Names of environment variables that the program gets besides PATH, HOME and LANG."""
    call_s: Annotated[float, FREE] = Field(default=30.0, gt=0.0)
    """Seconds within which it must answer."""

    @model_validator(mode="after")
    def _one_server(self) -> Mcp:
        if bool(self.command) == (self.url is not None):
            raise ValueError("The tool `mcp` takes a `command` or a `url`. Set one of both")
        sent = next((name for name in ("key_env", "headers_env") if getattr(self, name)), None)
        if sent is not None and self.url is None:
            raise ValueError(
                f"`{sent}` of the tool `mcp` goes with a `url`. A program gets the variables named in `env`."
            )
        for name in self.headers_env:
            twice = self.key_env is not None and name.lower() == "authorization"
            if (
                not _HEADER.fullmatch(name)
                or name.lower() in _OURS
                or name.lower().startswith("mcp-")
                or twice
            ):
                why = "is what `key_env` sets" if twice else "is none that a server may be sent from settings"
                raise ValueError(f"the header `{name[:80]}` in `headers_env` of the tool `mcp` {why}")
        if self.url is not None:
            open_address(self.url)
        return self

    @property
    def server(self) -> str:
        """The command or the address, to be shown."""
        return self.url or shlex.join(self.command)

    @property
    def headers(self) -> dict[str, str]:
        """What every request to `url` carries. ConfigError for a variable that is not set, or could be read."""
        for variable in (self.key_env, *self.headers_env.values()):
            if variable is None:
                continue
            if variable not in os.environ:
                raise ConfigError(f"The environment variable {variable} of the tool `mcp` is not set.")
            if not _VALUE.fullmatch(os.environ[variable]):
                raise ConfigError(
                    f"The environment variable {variable} of the tool `mcp` is no header's value: visible ASCII in one line."
                )
            check_private(variable, self.url or "")
        own = {name: os.environ[variable] for name, variable in self.headers_env.items()}
        return {**bearer(self.key_env, self.url or ""), **own}

    def check(self) -> None:
        """Start or reach it once and ask for its tools; ConfigError when that fails."""
        _ = self.headers
        self.schemas()

    def schemas(self) -> tuple[ToolSchema, ...]:
        """Return what the server offers, asked once for each process."""
        return _schemas(self.model_dump_json())

    def open(self) -> McpTools:
        """Return the server's tools; it starts with the first call."""
        return McpTools(self)


@functools.lru_cache(maxsize=32)
def _schemas(given: str) -> tuple[ToolSchema, ...]:
    settings = Mcp.model_validate_json(given)
    server: McpConnection | None = None
    try:
        server = connected(settings)
        return server.tools()
    except ToolFault as fault:
        raise ConfigError(
            f"The MCP server `{settings.server}` offers no tools: {fault}{_written(fault)}"
        ) from None
    finally:
        if server is not None:
            server.close()


def _written(fault: ToolFault) -> str:
    """Return the end of a lost server's standard error as a part of a message."""
    return f" It wrote to stderr:\n{fault.stderr}" if isinstance(fault, Lost) and fault.stderr else ""


def connected(settings: Mcp) -> McpConnection:
    """Return a conversation with the server; ConfigError if the package is missing."""
    if importlib.util.find_spec("mcp") is None:
        raise AbsentPackage("The tool `mcp` needs an extra: pip install 'kapelle[mcp]'.")
    from kapelle.environments.tools.mcp_session import McpConnection, McpProgram, Pipes, Requests

    if settings.url is None:
        return McpConnection(Pipes(McpProgram(settings.command, settings.env)), settings.call_s)
    return McpConnection(Requests(settings.url, settings.headers, local=settings.local), settings.call_s)


class McpTools(Toolbox):
    """One process of a server, or one session, begun when first called, and again after it was lost."""

    def __init__(self, settings: Mcp) -> None:
        self._settings = settings
        self._server: McpConnection | None = None
        super().__init__(
            *(Tool(each, functools.partial(self._call, each.name)) for each in settings.schemas())
        )

    def _call(self, name: str, arguments: Mapping[str, Json]) -> str:
        try:
            if self._server is None:
                self._server = connected(self._settings)
            return self._server.call(name, arguments)
        except Lost as fault:
            LOG.warning("The MCP server `%s`: %s%s", self._settings.server, fault, _written(fault))
            self.close()
            raise

    def close(self) -> None:
        """End the process or the session."""
        if self._server is not None:
            self._server.close()
            self._server = None
