"""With few descriptors episodes wait in a queue, and none fails."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

from kapelle.runtime.machine import most_open

PLAY = """
import asyncio, json, os, resource, sys
soft, hard = map(int, sys.argv[1:3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from dataclasses import replace
from tests.rollout.test_setup import NAMES, stage
from kapelle.engines.rollout.endpoint import EndpointEngine
from kapelle.rollout.episodes import rollout
from kapelle.team import Endpoint
from kapelle.types import Task

async def endpoints(count):
    body = json.dumps({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}).encode()

    async def serve(reader, writer):
        await reader.readuntil(b"\\r\\n\\r\\n")
        await asyncio.sleep(0.05)
        writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=2048)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    play = replace(stage(), engine=EndpointEngine({n: Endpoint(url, "theirs") for n in NAMES}, retries=0))
    tasks = [Task(f"{k}", "?", {}) for k in range(count)]
    groups = await rollout(play, tasks, 1, 0)
    return [episode.error for group in groups for episode in group.episodes]


errors = asyncio.run(globals()[sys.argv[3]](int(sys.argv[4])))
print(json.dumps({"errors": [e for e in errors if e], "played": len(errors),
                  "soft": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}))
"""


def played(soft: int, hard: int, what: str, count: int) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PLAY, *map(str, (soft, hard)), what, str(count)],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["", *filter(None, sys.path)])},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.slow
def test_more_episodes_than_descriptors_wait_in_line() -> None:
    found = played(128, 128, "endpoints", 150)
    assert (found["errors"], found["played"]) == ([], 150)


def test_the_room_is_the_rest_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    monkeypatch.setattr(os, "listdir", lambda _: ["descriptor"] * 68)
    assert most_open(0, 4096) == 4096
    assert most_open(6, 4096) == (1024 - 68 - 256) // 6
    assert most_open(6, 10) == 10
    assert most_open(5000, 10) == 1
