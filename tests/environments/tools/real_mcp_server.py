"""A server made with the official package: on its pipes, or over HTTP on the port of this machine that is named."""

from __future__ import annotations

import os
import sys

from mcp.server import MCPServer

server = MCPServer("real")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def environment() -> str:
    """Names what it was given."""
    return ",".join(sorted(os.environ))


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("it does not work")


@server.tool()
def flood() -> str:
    """Says too much."""
    return "x" * (3 << 20)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[1]), json_response=sys.argv[2:] == ["json"])
