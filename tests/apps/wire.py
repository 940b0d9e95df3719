"""Runs an episode of the program PROGRAM, and writes each answer that arrives over the wire to a line of the file WIRE.

Standard library only: kapelle is not installed where the frameworks are.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

PROGRAM = runpy.run_path(os.environ["PROGRAM"])


def episode(task: dict[str, Any]) -> Any:
    """Run the program's episode."""
    for name in ("httpx", "httpx2"):
        if name in sys.modules:
            listen(sys.modules[name])
    return PROGRAM["episode"](task)


def listen(client: Any) -> None:
    """Write whatever is answered to `client`'s calls to the file."""

    def keep(request: Any, response: Any) -> None:
        if request.url.path.endswith(("/chat/completions", "/messages")) and response.status_code == 200:
            line = {"url": str(request.url), "asked": json.loads(request.content), "said": response.json()}
            with Path(os.environ["WIRE"]).open("a") as file:
                file.write(json.dumps(line) + "\n")

    plain, waiting = client.Client.send, client.AsyncClient.send

    def send(self: Any, request: Any, **more: Any) -> Any:
        response = plain(self, request, **more)
        if not more.get("stream"):
            keep(request, response)
        return response

    async def send_async(self: Any, request: Any, **more: Any) -> Any:
        response = await waiting(self, request, **more)
        if not more.get("stream"):
            keep(request, response)
        return response

    client.Client.send, client.AsyncClient.send = send, send_async
