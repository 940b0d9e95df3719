"""Tools of an MCP server (Model Context Protocol). The server is a local program or runs on the network.

The module `mcp_session` manages the connection with the official package (the extra `mcp`). Resources, prompts and sampling are not
supported. Messages have a maximum size, and a server that does not respond in time is disconnected.
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
"""Headers that the protocol itself uses, in addition to all headers whose names begin with `mcp-`."""


class Mcp(ToolSettings, StartsProgram):
    """Settings of the tools of one MCP server. Every agent of every episode has its own process or session."""

    tool: Literal["mcp"] = "mcp"
    descriptors: ClassVar[int] = 3
    """The number of file descriptors that a server needs: two pipes and a file, or one connection."""
    command: tuple[str, ...] = ()
    """The program of the server, with its arguments. The program runs with the permissions of this process, outside the sandbox."""
    url: str | None = None
    """The URL of a server that supports streamable HTTP. Set either `url` or `command`."""
    local: bool = False
    """Whether `url` may refer to this machine or its local network."""
    key_env: Annotated[str | None, FREE] = None
    """The name of the environment variable that holds a bearer token for `url`."""
    headers_env: Annotated[Mapping[str, str], FREE] = Field(default_factory=dict)
    """Mapping from additional headers for `url` to the environment variables that hold their values, such as `{X-API-Key:
    SEARCH_KEY}`."""
    env: tuple[str, ...] = ()
    """The names of the environment variables that the program receives in addition to PATH, HOME and LANG."""
    call_s: Annotated[float, FREE] = Field(default=30.0, gt=0.0)
    """Maximum time in seconds for the server to respond."""

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
        """The command or the URL of the server, as it appears in messages."""
        return self.url or shlex.join(self.command)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request to `url`. Raises ConfigError if a variable is not set or would be sent without encryption."""
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
        """Connect once and list the tools. Raises ConfigError if this fails."""
        _ = self.headers
        self.schemas()

    def schemas(self) -> tuple[ToolSchema, ...]:
        """Return the schemas of the server's tools, which are requested once per process."""
        return _schemas(self.model_dump_json())

    def open(self) -> McpTools:
        """Return the tools of one agent for one episode. The first call of a tool connects to the server."""
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
    """Return a sentence with the end of the server's standard error output, or an empty string if there is none."""
    return f" It wrote to stderr:\n{fault.stderr}" if isinstance(fault, Lost) and fault.stderr else ""


def connected(settings: Mcp) -> McpConnection:
    """Connect to the server and return the connection. Raises ConfigError if the package is missing."""
    if importlib.util.find_spec("mcp") is None:
        raise AbsentPackage("The tool `mcp` needs an extra. Run: pip install 'kapelle[mcp]'.")
    from kapelle.environments.tools.mcp_session import McpConnection, McpProgram, Pipes, Requests

    if settings.url is None:
        return McpConnection(Pipes(McpProgram(settings.command, settings.env)), settings.call_s)
    return McpConnection(Requests(settings.url, settings.headers, local=settings.local), settings.call_s)


class McpTools(Toolbox):
    """The tools of one process or session of a server.

    The first call starts the process or session. If the process or session is lost, the next call starts a new one.
    """

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
        """Terminate the process or close the session."""
        if self._server is not None:
            self._server.close()
            self._server = None
