"""Plays one program many times and imports its framework once: a test has hundreds of episodes, and an import takes seconds.

    python preload.py PROGRAM SOCKET WIRE   imports what the program imports, and waits
    python preload.py SOCKET                stands for one run of the program: `environment.command`

The second process hands its environment and its output to the first one, which forks; the copy runs the whole program as
`__main__`, and writes each answer that comes over the wire to a line of WIRE. Standard library only: kapelle is not installed
where the frameworks are.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any


def serve(program: str, address: str, wire: str) -> None:
    """Fork for every connection until the process that started this one ends."""
    runpy.run_path(program, run_name="imported")
    for name in ("httpx", "httpx2"):
        if name in sys.modules:
            listen(sys.modules[name], wire)
    waiting = socket.socket(socket.AF_UNIX)
    waiting.bind(address)
    waiting.listen(64)
    parent = os.getppid()
    running: dict[socket.socket, int] = {}
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while os.getppid() == parent:
        found, _, _ = select.select([waiting, *running], [], [], 0.05)
        for each in found:
            if each is waiting:
                asked, _ = waiting.accept()
                running[asked] = start(asked, waiting, program)
            else:  # the process that stood for it is gone
                with suppress(ProcessLookupError):
                    os.kill(running[each], signal.SIGKILL)
        for asked, child in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                with suppress(OSError):
                    asked.sendall(bytes([os.waitstatus_to_exitcode(status) & 255]))
                asked.close()
                del running[asked]


def listen(client: Any, wire: str) -> None:
    """Write whatever is answered to `client`'s calls to a file."""

    def keep(request: Any, response: Any) -> None:
        if request.url.path.endswith("/chat/completions") and response.status_code == 200:
            line = {"url": str(request.url), "asked": json.loads(request.content), "said": response.json()}
            with Path(wire).open("a") as file:
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


def start(asked: socket.socket, waiting: socket.socket, program: str) -> int:
    """Return the process that runs the program as the other side says."""
    body, outputs, _, _ = socket.recv_fds(asked, 1 << 20, 2)
    child = os.fork()
    if child:
        for each in outputs:
            os.close(each)
        return child
    code = 1
    try:
        waiting.close()
        os.dup2(outputs[0], 1)
        os.dup2(outputs[1], 2)
        os.environ.clear()
        os.environ.update(json.loads(body))
        runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001 - said as Python says it, and the copy ends
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def stand_for(address: str) -> int:
    """Let the program run with this process's environment and output, and return its exit code."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(address)
        socket.send_fds(asking, [json.dumps(dict(os.environ)).encode()], [1, 2])
        answer = asking.recv(1)
    return answer[0] if answer else 1


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.path.insert(0, str(Path(sys.argv[1]).resolve().parent))
        serve(*sys.argv[1:])
    else:
        raise SystemExit(stand_for(sys.argv[1]))
