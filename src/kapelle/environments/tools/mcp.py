"""Tools of an MCP server (Model Context Protocol), which is a local program or a server on the network.

`mcp_session` manages the connection with the official package (the extra `mcp`). Resources, prompts and sampling are not supported.
Messages have a size limit, and a server that misses a deadline is disconnected.
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
"""Headers that the protocol itself uses, in addition to all headers that begin with `mcp-`."""


class Mcp(ToolSettings, StartsProgram):
    """The tools of one server; every agent of every episode has its own process or session."""

    tool: Literal["mcp"] = "mcp"
    descriptors: ClassVar[int] = 3
    """Number of file descriptors of one server: two pipes and a file, or one connection."""
    command: tuple[str, ...] = ()
    """The program with its arguments; it runs with this process's permissions, outside the sandbox."""
    url: str | None = None
    """The address of a server with streamable HTTP, which replaces the command."""
    local: bool = False
    """True: `url` may lead to this machine or its network."""
    key_env: Annotated[str | None, FREE] = None
    """Environment variable with a bearer token for `url`."""
    headers_env: Annotated[Mapping[str, str], FREE] = Field(default_factory=dict)
    """Additional headers for `url`, each with the environment variable that holds its value: `{X-API-Key: SEARCH_KEY}`."""
    env: tuple[str, ...] = ()
    """Environment variables that the program receives in addition to PATH, HOME and LANG."""
    call_s: Annotated[float, FREE] = Field(default=30.0, gt=0.0)
    """Seconds that the server has to answer."""

    @model_validator(mode="after")
    def _check_server(self) -> Mcp:
        if bool(self.command) == (self.url is not None):
            raise ValueError("The tool `mcp` needs either a `command` or a `url`")
        secret = next((name for name in ("key_env", "headers_env") if getattr(self, name)), None)
        if secret is not None and self.url is None:
            raise ValueError(
                f"`{secret}` of the tool `mcp` needs a `url`. To pass variables to a program, list them in `env`"
            )
        ours = _OURS | ({"authorization"} if self.key_env else set())
        for name in self.headers_env:
            if not _HEADER.fullmatch(name) or name.lower() in ours or name.lower().startswith("mcp-"):
                raise ValueError(
                    f"the header `{name[:80]}` in `headers_env` of the tool `mcp` is invalid or set by kapelle. Remove it"
                )
        if self.url is not None:
            open_address(self.url)
        return self

    @property
    def server(self) -> str:
        """The command or the address, as it appears in messages."""
        return self.url or shlex.join(self.command)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request to `url`; raises ConfigError if a variable is not set or would be sent unencrypted."""
        for variable in (self.key_env, *self.headers_env.values()):
            if variable is None:
                continue
            if variable not in os.environ:
                raise ConfigError(
                    f"The environment variable {variable}, which the tool `mcp` needs, is not set. Set it."
                )
            if not _VALUE.fullmatch(os.environ[variable]):
                raise ConfigError(
                    f"The environment variable {variable} of the tool `mcp` is not a valid header value. Use visible ASCII "
                    "characters on one line."
                )
            check_private(variable, self.url or "")
        own = {name: os.environ[variable] for name, variable in self.headers_env.items()}
        return {**bearer(self.key_env, self.url or ""), **own}

    def check(self) -> None:
        """Connect once and list the tools; raise ConfigError if that fails."""
        _ = self.headers
        self.schemas()

    def schemas(self) -> tuple[ToolSchema, ...]:
        """Return the server's tools, listed once per process."""
        return _schemas(self.model_dump_json())

    def open(self) -> McpTools:
        """Return the tools; the first call connects."""
        return McpTools(self)


@functools.lru_cache(maxsize=32)
def _schemas(form: str) -> tuple[ToolSchema, ...]:
    settings = Mcp.model_validate_json(form)
    server: McpConnection | None = None
    try:
        server = connected(settings)
        return server.tools()
    except ToolFault as fault:
        raise ConfigError(
            f"The MCP server `{settings.server}` cannot be used: {fault}{_written(fault)}"
        ) from None
    finally:
        if server is not None:
            server.close()


def _written(fault: ToolFault) -> str:
    """Return the end of a lost server's standard error, as part of a message."""
    return f" It wrote to stderr:\n{fault.stderr}" if isinstance(fault, Lost) and fault.stderr else ""


def connected(settings: Mcp) -> McpConnection:
    """Connect to the server; raise ConfigError if the package is missing."""
    if importlib.util.find_spec("mcp") is None:
        raise AbsentPackage("The tool `mcp` needs an extra. Run: pip install 'kapelle[mcp]'.")
    from kapelle.environments.tools.mcp_session import McpConnection, McpProgram, Pipes, Requests

    if settings.url is None:
        return McpConnection(Pipes(McpProgram(settings.command, settings.env)), settings.call_s)
    return McpConnection(Requests(settings.url, settings.headers, local=settings.local), settings.call_s)


class McpTools(Toolbox):
    """One process or session of a server. The first call opens it; if it is lost, the next call opens it again."""

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
