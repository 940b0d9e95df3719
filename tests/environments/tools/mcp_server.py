"""A small MCP server for tests that misbehaves by its argument. Standard library only."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

TWO_NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS = [
    {"name": "add", "description": "Adds two numbers.", "inputSchema": TWO_NUMBERS},
    {"name": "count", "inputSchema": {"type": "object", "properties": {}}},
    {"name": "fail", "inputSchema": {"type": "object"}},
    {"name": "picture", "inputSchema": {"type": "object"}},
    {"name": "hang", "inputSchema": {"type": "object"}},
    {"name": "die", "inputSchema": {"type": "object"}},
    {"name": "flood", "inputSchema": {"type": "object"}},
    {"name": "babble", "inputSchema": {"type": "object"}},
    {"name": "environment", "inputSchema": {"type": "object"}},
]
CALLS = 0


def say(message: dict[str, Any]) -> None:
    if sys.argv[1:] == ["stray"]:
        sys.stdout.write('Listening.\n\n{"level": "info"}\n\xff\n')
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def text(said: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": said}]}


def called(name: str, arguments: dict[str, Any], mode: str = "") -> dict[str, Any] | None:
    global CALLS  # noqa: PLW0603 (the state that the test looks at)
    CALLS += 1
    if name == "add":
        return text(str(arguments["a"] + arguments["b"]))
    if name == "fail":
        return {**text("it does not work"), "isError": True}
    if name == "picture":
        return {
            "content": [
                {"type": "image", "data": "00", "mimeType": "image/png"},
                {"type": "text", "text": "a cat"},
            ]
        }
    if name == "hang" and mode == "modern":
        form = {"message": "who?", "requestedSchema": {"type": "object", "properties": {}}}
        asked = {"who": {"method": "elicitation/create", "params": form}}
        return {"resultType": "input_required", "inputRequests": asked}
    if name == "hang":
        time.sleep(60)
    if name == "die":
        os._exit(1)
    if name == "flood":
        sys.stdout.write("x" * (3 << 20))
        sys.stdout.flush()
        time.sleep(60)
    if name == "babble":
        print("this is not a message", flush=True)  # noqa: T201 (on the very channel)
    if name == "environment":
        return text(",".join(sorted(os.environ)))
    return text(str(CALLS)) if name == "count" else None


def answer(request: dict[str, Any], mode: str) -> None:
    number, method = request["id"], request["method"]
    if method == "initialize" and mode == "modern":
        say({"id": number, "error": {"code": -32601, "message": "Method not found"}})
    elif method == "initialize":
        assert request["params"]["protocolVersion"]
        version = {"protocolVersion": request["params"]["protocolVersion"], "capabilities": {"tools": {}}}
        greeting = {} if mode == "no greeting" else {"serverInfo": {"name": "test", "version": "1"}}
        say({"id": number, "result": {**version, **greeting}})
    elif method == "server/discover":
        known: dict[str, Any] = {
            "supportedVersions": ["2026-07-28"],
            "capabilities": {"tools": {}},
            "resultType": "complete",
        }
        say({"id": number, "result": {**known, "ttlMs": 0, "cacheScope": "private"}})
    elif method == "tools/call" and mode == "modern":
        result = called(request["params"]["name"], request["params"].get("arguments", {}), mode)
        say({"id": number, "result": {"resultType": "complete", **(result or {})}})
    elif method == "tools/call" and mode == "hologram" and request["params"]["name"] == "add":
        called("add", request["params"]["arguments"])
        say({"id": number, "result": {"content": [{"type": "hologram", "data": "00"}]}})
    elif method == "tools/list":
        page = int(request.get("params", {}).get("cursor", "0"))
        pages: dict[str, Any] = (
            {"next": {"nextCursor": str(page + 1)}} if page == 0 and mode != "endless" else {}
        )
        more = pages.get("next", {"nextCursor": "1"} if mode == "endless" else {})
        half = TOOLS[:4] if page == 0 else TOOLS[4:]
        if mode == "modern":
            more |= {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
        say({"id": number, "result": {"tools": "none" if mode == "no list" else half, **more}})
    elif method == "tools/call" and mode == "chatty":
        while True:
            say({"method": "notifications/message", "params": {"level": "info"}})
            say({"id": 999, "result": {}})
    elif method == "tools/call":
        # A notification and requests of the server's own may stand before the answer.
        say({"method": "notifications/message", "params": {"level": "info"}})
        say({"id": "s1", "method": "ping"})
        say({"id": "s2", "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}})
        replies = {reply["id"]: reply for reply in (json.loads(sys.stdin.readline()) for _ in range(2))}
        assert replies["s1"]["result"] == {}
        assert "not supported" in replies["s2"]["error"]["message"]
        result = called(request["params"]["name"], request["params"].get("arguments", {}))
        say(
            {"id": number, "result": result}
            if result
            else {"id": number, "error": {"code": 1, "message": "no"}}
        )


def main() -> None:
    mode = sys.argv[1] if len(sys.argv) > 1 else ""
    if mode == "deaf":
        answer(json.loads(sys.stdin.readline()), mode)
    if mode in {"silent", "deaf"}:
        time.sleep(60)
    initialized = False
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("method") == "notifications/initialized":
            initialized = True
        elif "id" in message:
            assert initialized or message["method"] == "initialize" or mode == "modern"
            answer(message, mode)


if __name__ == "__main__":
    main()
