"""The environment server on loopback: moves per second beside episode states in this process, and what it bears.

    python -m benchmarks.environment_server                       # everything, five minutes on two cores
    python -m benchmarks.environment_server --hostile 20000 --only hostile

Episode states are matrix games, which cost almost nothing: what is measured is the way to them and back. The server is a process of its
own (`kapelle serve environments`) on the same cores as its clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import httpx
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from kapelle.environment import RemoteState
from kapelle.environments.matrix import Matrix
from kapelle.environments.remote import Remote
from kapelle.rollout.bounded_states import BoundedState, open_state
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.wire.worlds import PATH

NAMES = ("ann", "ben")
AT_ONCE = (1, 4, 16, 64, 256)
"""Numbers of sessions that move at once."""
MOVES = 4096
"""Of all sessions together, for each of these numbers."""
GAME = Matrix(game="prisoners_dilemma", rounds=MOVES, rules="none")
SERVED = ["it=matrix", "it.game=prisoners_dilemma", f"it.rounds={MOVES}", "it.rules=none"]
VANISHING, PROCESSES = 1000, 10
PROBE_SECONDS = 0.05
MAIN = "import sys; from kapelle.cli import main; sys.exit(main(sys.argv[1:]))"
VANISH = """
import sys, time
from benchmarks.environment_server import asked, began, connected
held = []
for k in range(int(sys.argv[2])):
    socket = connected(sys.argv[1])
    assert "value" in asked(socket, began(k)), k
    held.append(socket)
print("ready", flush=True)
time.sleep(600)
"""


def connected(address: str) -> Connection:
    """Return a connection to a server."""
    return connect(f"ws://{address}{PATH}", compression=None, proxy=None, open_timeout=60)


def asked(socket: Connection, question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a question, the only one under way."""
    socket.send(json.dumps({"id": 1, **question}))
    answer: dict[str, Any] = json.loads(socket.recv(timeout=60))
    return answer


def began(seed: int, session: int = 1) -> dict[str, Any]:
    """Return the question that opens a session."""
    return {"call": "reset", "session": session, "agents": list(NAMES), "index": 0, "seed": seed}


def run(hostile: int = 20_000) -> dict[str, Any]:
    """Measure moves, callers that vanish, a signal under load, and bodies that are no messages."""
    return {
        "moves": moves(),
        "1,000 clients that vanish": vanishing(),
        "SIGTERM under load": stopping(),
        "bodies that are no messages": hostile_bodies(hostile),
    }


@contextmanager
def serving(*more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server; its process and its address."""
    command = [sys.executable, "-c", MAIN, "serve", "environments", "--port", "0", "--environments", *SERVED]
    process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True)  # noqa: S603 - ours
    try:
        assert process.stdout is not None
        found = re.search(r"served at (\S+)", process.stdout.readline())
        assert found is not None
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def moves() -> dict[str, Any]:
    """Return moves per second and the time of one, here and on the server."""
    found: dict[str, Any] = {}
    with serving() as (_, address):
        remote = Remote(address=(address,))
        ways: dict[str, Callable[[int], Any]] = {
            "here": lambda seed: open_state(GAME, GAME.task("train", 0), NAMES, seed, Patience()),
            "server": lambda seed: remote.open_state(GAME.task("train", 0), NAMES, seed, Patience()),
        }
        for count in AT_ONCE:
            for way, opened in ways.items():
                seconds, each = run_async(lambda o=opened, n=count: _moved(o, n))  # type: ignore[misc]
                parts = statistics.quantiles(each, n=100)
                found.setdefault(str(count), {})[way] = {
                    "per_s": round(len(each) / seconds),
                    "p50_us": round(1e6 * parts[49]),
                    "p99_us": round(1e6 * parts[98]),
                }
    return found


async def _moved(opened: Callable[[int], Any], count: int) -> tuple[float, list[float]]:
    worlds = await asyncio.gather(*map(opened, range(count)))
    each: list[float] = []

    async def play(world: BoundedState | RemoteState) -> None:
        for _ in range(MOVES // count):
            began = time.perf_counter()
            await world.step(dict.fromkeys(NAMES, "A"))
            each.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*map(play, worlds))
    seconds = time.perf_counter() - began
    await asyncio.gather(*(world.close() for world in worlds))
    return seconds, each


class Probe:
    """Asks again and again for the server's health; keeps how long the answers took."""

    def __init__(self, address: str) -> None:
        self.seconds: list[float] = []
        self._address, self._over = address, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with httpx.Client(base_url=f"http://{self._address}", timeout=60) as client:
            while not self._over.wait(PROBE_SECONDS):
                began = time.perf_counter()
                client.get("/health").raise_for_status()
                self.seconds.append(time.perf_counter() - began)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def said(self) -> dict[str, Any]:
        """Return how long the answers took."""
        return {
            "asked": len(self.seconds),
            "p50_ms": round(1e3 * statistics.median(self.seconds), 1),
            "slowest_ms": round(1e3 * max(self.seconds), 1),
        }


def vanishing() -> dict[str, Any]:
    """Kill a thousand clients, each with a connection and a session of its own; return when a full table is free again."""
    with serving("--sessions", str(VANISHING)) as (process, address), Probe(address) as probe:
        command = [sys.executable, "-c", VANISH, address, str(VANISHING // PROCESSES)]
        clients = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 - ours
            for _ in range(PROCESSES)
        ]
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
        held = len(os.listdir(f"/proc/{process.pid}/fd"))  # noqa: PTH208 - a count
        for client in clients:
            client.kill()
        start = time.perf_counter()
        free, socket = 0, None
        while free < VANISHING:
            with suppress(Exception):  # no connection is free yet
                socket = socket or connected(address)
                free += "value" in asked(socket, began(free, free))
        seconds = time.perf_counter() - start
        for client in clients:
            client.wait()
        return {
            "all sessions free again after s": round(seconds, 2),
            "descriptors": {
                "held": held,
                "left": len(os.listdir(f"/proc/{process.pid}/fd")),  # noqa: PTH208 - a count
            },
            "probe": probe.said(),
        }


def stopping(callers: int = 64) -> dict[str, Any]:
    """Send SIGTERM while callers move; return how their calls ended."""
    ended: Counter[str] = Counter()
    with serving("--drain", "5") as (process, address):
        ready = threading.Barrier(callers + 1)

        def caller(seed: int) -> None:
            with connected(address) as socket:
                asked(socket, began(seed))
                moves = {"call": "act", "session": 1, "actions": dict.fromkeys(NAMES, "A")}
                ready.wait()
                while True:
                    try:
                        answer = asked(socket, moves)
                    except ConnectionClosed as closed:
                        # Sent when the server had ended: it was not accepted.
                        over = closed.rcvd is not None and closed.rcvd.code == 1012
                        ended["closed at the end" if over else f"lost: {closed}"] += 1
                        return
                    if "value" not in answer:
                        refused = answer.get("refused", [0])[0] == 503
                        ended["refused at the end" if refused else f"lost: {answer}"] += 1
                        return
                    ended["answered"] += 1

        threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(callers)]
        for thread in threads:
            thread.start()
        ready.wait()
        time.sleep(1.0)
        start = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        code = process.wait()
        return {**ended, "exit code": code, "ended after s": round(time.perf_counter() - start, 2)}


def hostile_bodies(count: int) -> dict[str, Any]:
    """Send texts that are no messages, and bytes that are no HTTP, while a probe asks."""
    with serving() as (process, address), Probe(address) as probe, connected(address) as socket:
        draw, statuses = random.Random(0), Counter[str]()
        for number in range(count):
            socket.send(_body(draw).decode("utf-8", "replace"))
            answer = json.loads(socket.recv(timeout=60))
            assert "Traceback" not in str(answer)
            statuses[str(answer["refused"][0]) if "refused" in answer else "answered"] += 1
            if number % 20 == 0:
                _garbage(address, draw)
        assert process.poll() is None, "it lives"
        return {"sent": count, "answers": dict(statuses), "probe": probe.said()}


def _body(draw: random.Random) -> bytes:
    act = {"call": "act", "session": 1, "actions": {"ann": "A"}}
    whole = [json.dumps({"id": 1, **began(0)}), json.dumps({"id": 1, **act}), "[" * 5_000]
    body = bytearray(draw.choice(whole).encode())
    for _ in range(draw.randrange(1, 8)):
        place = draw.randrange(len(body) + 1)
        body[place : place + draw.randrange(3)] = draw.randbytes(draw.randrange(4))
    return bytes(body) if draw.random() < 0.8 else draw.randbytes(draw.randrange(300))


def _garbage(address: str, draw: random.Random) -> None:
    """Send bytes that are no HTTP, or begin as such, and leave."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw, suppress(OSError):
        preface = f"GET {PATH} HTTP/1.1\r\nHost: x\r\n".encode() if draw.random() < 0.7 else b""
        raw.sendall(preface + draw.randbytes(draw.randrange(200)))


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "moves": moves,
    "vanishing": vanishing,
    "stopping": stopping,
}


def main(arguments: Sequence[str]) -> int:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hostile", type=int, default=20_000)
    parser.add_argument("--only", choices=[*PARTS, "hostile"])
    asked = parser.parse_args(arguments)
    if asked.only == "hostile":
        print(json.dumps(hostile_bodies(asked.hostile), indent=2))
    else:
        print(json.dumps(PARTS[asked.only]() if asked.only else run(asked.hostile), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
