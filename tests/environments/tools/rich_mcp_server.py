"""A server of the official package with all kinds of content, notifications and its own requests.

It serves on its pipes, or over HTTP at a given port; with `modern` it does not know `initialize`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, cast

import uvicorn
from mcp import MCPError, types
from mcp.server import MCPServer
from mcp.server.mcpserver import Audio, Context, Image
from pydantic import BaseModel

server = MCPServer("rich")


class Weather(BaseModel):
    degrees: float
    sky: str


class Name(BaseModel):
    name: str


def plain(name: str) -> Any:
    """Offer a tool whose result is sent unchanged."""
    return server.tool(name=name, structured_output=False)


@server.tool()
def weather() -> Weather:
    """Returns structured content and its text."""
    return Weather(degrees=21.5, sky="clear")


@plain("structure")
def structure() -> types.CallToolResult:
    """Returns structured content alone."""
    return types.CallToolResult(content=[], structured_content={"sky": "grün", "degrees": [1, 2.5]})


@plain("picture")
def picture() -> list[Any]:
    """Returns an image and a text."""
    return [Image(data=b"\x89PNG", format="png"), "a cat"]


@plain("sound")
def sound() -> Audio:
    """Returns a sound."""
    return Audio(data=b"RIFF", format="wav")


@plain("resources")
def resources() -> types.CallToolResult:
    """Returns a link and two resources."""
    text = types.TextResourceContents(uri="file:///notes.txt", text="what the notes say")
    blob = types.BlobResourceContents(uri="file:///cat.png", blob="AAAA")
    return types.CallToolResult(
        content=[
            types.ResourceLink(name="a report", uri="https://tools.example/report", type="resource_link"),
            types.EmbeddedResource(resource=text, type="resource"),
            types.EmbeddedResource(resource=blob, type="resource"),
        ]
    )


@plain("tells")
async def tells(context: Context) -> str:
    """Sends notifications."""
    for done in range(50):
        await context.report_progress(done, 50, "working")
        await context.info("still working")
    await context.notify_tools_changed()
    return "done"


@plain("asks")
async def asks(context: Context, what: str) -> str:
    """Sends a request to its client; returns how that was declined."""
    words = types.SamplingMessage(role="user", content=types.TextContent(text="think", type="text"))
    requests = {
        "sampling": lambda: context.session.create_message([words], max_tokens=10),
        "elicitation": lambda: context.elicit("who are you?", Name),
        "roots": context.session.list_roots,
    }
    try:
        await cast("Any", requests[what]())
    except (MCPError, RuntimeError) as declined:
        return f"declined: {declined}"
    return "it was answered"


@plain("hang")
async def hang() -> str:
    """Answers after a minute."""
    await asyncio.sleep(60)
    return "late"


class WithoutInitialize:
    """The same server with only versions without `initialize`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._inner(scope, receive, send)
            return
        message = await receive()
        request = json.loads(message["body"])
        if request["method"] != "initialize":
            first = [message]

            async def replay() -> Any:
                return first.pop() if first else await receive()

            await self._inner(scope, replay, send)
            return
        error = {"code": -32601, "message": "Method not found"}
        body = json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run("stdio")
    else:
        application = server.streamable_http_app()
        served: Any = WithoutInitialize(application) if sys.argv[2:] == ["modern"] else application
        uvicorn.run(served, port=int(sys.argv[1]), log_level="critical")
