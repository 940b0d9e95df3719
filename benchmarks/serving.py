"""The policy server under load: its cost beside the engine alone, clients that vanish, a probe, a signal.

No peer: the engine without a server is what the server is compared with. Clients are threads of this process, so that
their work is part of the server's cost here; on a machine of its own it would not be.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from benchmarks.measure import single_thread
from benchmarks.subjects import subject
from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.rollout.protocol import Request
from kapelle.environments.arithmetic import Arithmetic
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.event_loop import run_async
from kapelle.services.binding import Binding
from kapelle.services.policy.service import PolicyServer, ServingLimits, serve_policy
from kapelle.team import Agent, Policy, Team
from kapelle.types import Message, Sampling, Task
from kapelle.workflows.solo import Solo

CLIENTS, NEW = 64, 96
"""Calls at once, and the tokens of each answer."""
ROUNDS = 5
VANISHING = 1000
ASKED = {
    "model": "bench/solver",
    "messages": [{"role": "user", "content": "What is 12+34?"}],
    "max_tokens": NEW,
}


def run() -> dict[str, Any]:
    """Return tokens per second through the server and without it, and how it bears clients that vanish and a drain."""
    single_thread()
    setup = _play()
    with serve_policy(setup, "bench", Binding(), ServingLimits(calls=4096)) as server:
        return {
            "overhead": _overhead(setup, server),
            "1,000 clients that vanish": _vanishing(server),
            "calls under way when the server is told to stop": _drained(server),
        }


def _play() -> RolloutSetup:
    team = Team(
        (Agent("solver", sampling=Sampling(max_tokens=NEW)),),
        {"solver": Policy("solver", trained=False)},
        {"solver": "solver"},
    )
    engine = LocalEngine({"base": subject("10M")}, list(team.policies.values()))
    return RolloutSetup(team, Arithmetic(), Solo(), engine)


def _overhead(setup: RolloutSetup, server: PolicyServer) -> dict[str, Any]:
    """Return the median tokens per second of both, taken in turns, and the share by which the server is slower."""
    direct: list[_Pace] = []
    served: list[_Pace] = []
    with httpx.Client(timeout=600.0, limits=httpx.Limits(max_connections=CLIENTS)) as client:
        for number in range(ROUNDS + 1):
            _direct(setup, number, direct)
            _served(client, server, number, served)
    del direct[0], served[0]  # the first round makes everything ready
    return {
        "engine_tokens_per_second": statistics.median(each.per_second for each in direct),
        "server_tokens_per_second": statistics.median(each.per_second for each in served),
        "engine_tokens_per_cpu_second": statistics.median(each.per_cpu_second for each in direct),
        "server_and_clients_tokens_per_cpu_second": statistics.median(each.per_cpu_second for each in served),
        "slower_by": statistics.median(
            1 - b.per_second / a.per_second for a, b in zip(direct, served, strict=True)
        ),
    }


class _Pace(NamedTuple):
    per_second: float
    per_cpu_second: float


@contextmanager
def _timed(tokens: list[int], paces: list[_Pace]) -> Iterator[None]:
    """Append the pace of the tokens that are counted inside the block."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    count = sum(tokens)
    paces.append(_Pace(count / (time.perf_counter() - wall), count / (time.process_time() - cpu)))


def _direct(setup: RolloutSetup, number: int, paces: list[_Pace]) -> None:
    messages = (Message("user", "What is 12+34?"),)
    ids = setup.engine.renderer("solver").start(messages)
    sampling = Sampling(max_tokens=NEW)
    requests = [
        Request("solver", "solver", messages, ids, sampling, 1000 * number + k, Task("t", ""))
        for k in range(CLIENTS)
    ]

    async def all_of_them() -> int:
        said = await asyncio.gather(*map(setup.engine.generate, requests))
        return sum(len(each.ids) for each in said)

    tokens: list[int] = []
    with _timed(tokens, paces):
        tokens.append(run_async(all_of_them))


def _served(client: httpx.Client, server: PolicyServer, number: int, paces: list[_Pace]) -> None:
    tokens: list[int] = []

    def ask(k: int) -> None:
        said = client.post(f"{server.url}/v1/chat/completions", json={**ASKED, "seed": 1000 * number + k})
        tokens.append(said.json()["usage"]["completion_tokens"])

    with ThreadPoolExecutor(CLIENTS) as pool, _timed(tokens, paces):
        list(pool.map(ask, range(CLIENTS)))


def _vanishing(server: PolicyServer) -> dict[str, Any]:
    """Send calls and hang up; return how a probe was answered meanwhile, and after how long no row was left."""
    body = json.dumps({**ASKED, "max_tokens": 400}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    call = head + f"content-length: {len(body)}\r\n\r\n".encode() + body
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    probes: list[float] = []
    over = threading.Event()

    def probe() -> None:
        with httpx.Client(timeout=60.0) as client:
            while not over.is_set():
                start = time.perf_counter()
                client.get(f"{server.url}/health").raise_for_status()
                probes.append(time.perf_counter() - start)
                time.sleep(0.01)

    watcher = threading.Thread(target=probe)
    watcher.start()
    for k in range(VANISHING):
        with socket.create_connection(address) as connection:
            connection.sendall(call)
            if k % 3 == 0:
                time.sleep(0.002)
    gone = time.perf_counter()
    with httpx.Client(timeout=60.0) as client:
        while client.get(f"{server.url}/health").json()["under_way"]:
            time.sleep(0.01)
        empty = time.perf_counter() - gone
        start = time.perf_counter()
        client.post(f"{server.url}/v1/chat/completions", json={**ASKED, "max_tokens": 1}).raise_for_status()
        after = time.perf_counter() - start
    over.set()
    watcher.join()
    return {
        "seconds_until_no_row_was_left": empty,
        "next_call_seconds": after,
        "probes": len(probes),
        "slowest_probe_seconds": max(probes),
    }


def _drained(server: PolicyServer) -> dict[str, Any]:
    """Tell the server to stop with calls under way; return how many were accepted and how many answered."""
    with httpx.Client(timeout=600.0) as client, ThreadPoolExecutor(CLIENTS) as pool:
        calls = [
            pool.submit(client.post, f"{server.url}/v1/chat/completions", json=ASKED) for _ in range(CLIENTS)
        ]
        while server.service.under_way < CLIENTS:
            time.sleep(0.001)
        whole = server.drain(600.0)
        answered = sum(call.exception() is None and call.result().status_code == 200 for call in calls)
    assert whole, "everything was answered in time"
    return {"accepted": CLIENTS, "answered": answered}
