"""The reward server under load: requests a second and their delay by size, against its scorer asked directly.

No peer: the scorer without a server is what the server is compared with. Clients are threads of this process, so that
their work is part of the server's cost here; on a machine of its own it would not be.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx

from benchmarks.measure import single_thread
from benchmarks.subjects import question, subject
from kapelle.engines.train.protocol import TrainSetup, UpdateLimits
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.services.binding import Binding
from kapelle.services.reward.scores import Answered
from kapelle.services.reward.serving import RewardLimits, RewardServer, serve_reward
from kapelle.settings.schema import OptimizerConfig
from kapelle.team import VERIFIER, Critic, Lora
from kapelle.training.served_verifier import VerifierScorer
from kapelle.types import Message
from kapelle.wire import reward_v1_pb2 as wire
from kapelle.wire import reward_v1_pb2_grpc as methods

SIZES = (1, 8, 64)
"""Answers in one request."""
CLIENTS = 16
ANSWERS = 256
"""Of each measurement, over all clients."""
TOKENS = 128
"""Of each question and its answer together."""
ROUNDS = 3


def run() -> dict[str, Any]:
    """Return answers a second and the delay of requests, by their size and protocol, against the scorer alone."""
    single_thread()
    scorer = _scorer()
    with serve_reward(scorer, Binding(), RewardLimits(batch=64), grpc_port=0) as server:
        direct = statistics.median(_direct(scorer) for _ in range(ROUNDS))
        found: dict[str, Any] = {"scorer_alone_answers_per_second": direct}
        for size in SIZES:
            for protocol, ask in (("http", _http), ("grpc", _grpc)):
                found[f"{protocol}, {size} in a request"] = _measured(server, size, ask, direct)
        return found


def _scorer() -> VerifierScorer:
    setup = TrainSetup(
        {"base": subject("1M")},
        [],
        [Critic(VERIFIER, "base", Lora(8, 16.0))],
        OptimizerConfig(),
        UpdateLimits(),
        0,
    )
    return VerifierScorer(TorchTrainEngine(setup), {"name": "bench", "weights": "none"})


def _asked(seed: int) -> tuple[str, str]:
    text = question(seed, TOKENS)
    return text[: len(text) // 2], text[len(text) // 2 :]


def _direct(scorer: VerifierScorer) -> float:
    answers = [Answered((Message("user", asked),), text) for asked, text in map(_asked, range(ANSWERS))]
    start = time.perf_counter()
    for k in range(0, ANSWERS, 64):
        scorer.score(answers[k : k + 64])
    return ANSWERS / (time.perf_counter() - start)


Ask = Callable[[RewardServer, int], Callable[[Sequence[tuple[str, str]]], None]]


def _http(server: RewardServer, clients: int) -> Callable[[Sequence[tuple[str, str]]], None]:
    client = httpx.Client(timeout=600.0, limits=httpx.Limits(max_connections=clients))

    def ask(asked: Sequence[tuple[str, str]]) -> None:
        items = [{"question": question, "answer": answer} for question, answer in asked]
        client.post(f"{server.url}/v1/score", json={"items": items}).raise_for_status()

    return ask


def _grpc(server: RewardServer, clients: int) -> Callable[[Sequence[tuple[str, str]]], None]:
    assert server.grpc is not None, "it is asked for"
    stub = methods.RewardStub(grpc.insecure_channel(server.grpc.address))

    def ask(asked: Sequence[tuple[str, str]]) -> None:
        items = [wire.Item(question=question, answer=answer) for question, answer in asked]
        stub.Score(wire.ScoreRequest(items=items), timeout=600)

    return ask


def _measured(server: RewardServer, size: int, ask_by: Ask, direct: float) -> dict[str, float]:
    """Return the median over rounds, after one that makes everything ready."""
    ask = ask_by(server, CLIENTS)
    rates: list[float] = []
    delays: list[float] = []

    def timed(first: int) -> float:
        start = time.perf_counter()
        ask([_asked(first + k) for k in range(size)])
        return time.perf_counter() - start

    with ThreadPoolExecutor(CLIENTS) as pool:
        for number in range(ROUNDS + 1):
            start = time.perf_counter()
            took = list(pool.map(timed, range(0, ANSWERS, size)))
            if number:
                rates.append(ANSWERS / (time.perf_counter() - start))
                delays += took
    quantiles = statistics.quantiles(delays, n=100)
    rate = statistics.median(rates)
    return {
        "requests_per_second": rate / size,
        "answers_per_second": rate,
        "share_of_the_scorer_alone": rate / direct,
        "p50_ms": 1000 * quantiles[49],
        "p99_ms": 1000 * quantiles[98],
    }
