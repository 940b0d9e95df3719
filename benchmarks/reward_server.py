"""The reward server under load: requests a second and their delay by size, against its scorer asked directly.

No peer: the scorer without a server is what the server is compared with. Clients are threads of this process, so that
their work is part of the server's cost here; on a machine of its own it would not be.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
import httpx

from benchmarks.measure import single_thread
from benchmarks.subjects import question, subject
from kapelle.engines.train.protocol import TrainSetup, UpdateLimits
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.runtime.wire import reward_v1_pb2 as wire
from kapelle.runtime.wire import reward_v1_pb2_grpc as methods
from kapelle.services.binding import Binding
from kapelle.services.reward.scores import Answered, Scorer, verifier_scorer
from kapelle.services.reward.service import RewardLimits, RunningRewardServer, serve_reward
from kapelle.settings.schema import OptimizerConfig
from kapelle.team import VERIFIER, Critic, Lora
from kapelle.types import Message

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
        return {
            f"{protocol}, {size} in a request": _measured(scorer, ask(server, CLIENTS), size)
            for size in SIZES
            for protocol, ask in (("http", _http), ("grpc", _grpc))
        }


def _scorer() -> Scorer:
    setup = TrainSetup(
        {"base": subject("1M")},
        [],
        [Critic(VERIFIER, "base", Lora(8, 16.0))],
        OptimizerConfig(),
        UpdateLimits(),
        0,
    )
    return verifier_scorer(TorchTrainEngine(setup), {"name": "bench", "weights": "none"})


def _asked(seed: int) -> tuple[str, str]:
    text = question(seed, TOKENS)
    return text[: len(text) // 2], text[len(text) // 2 :]


def _direct(scorer: Scorer) -> None:
    answers = [Answered((Message("user", asked),), text) for asked, text in map(_asked, range(ANSWERS))]
    for k in range(0, ANSWERS, 64):
        scorer.score(answers[k : k + 64])


Ask = Callable[[Sequence[tuple[str, str]]], None]


def _http(server: RunningRewardServer, clients: int) -> Ask:
    client = httpx.Client(timeout=600.0, limits=httpx.Limits(max_connections=clients))

    def ask(asked: Sequence[tuple[str, str]]) -> None:
        items = [{"question": question, "answer": answer} for question, answer in asked]
        client.post(f"{server.url}/v1/score", json={"items": items}).raise_for_status()

    return ask


def _grpc(server: RunningRewardServer, clients: int) -> Ask:
    assert server.grpc is not None, "it is asked for"
    stub = methods.RewardStub(grpc.insecure_channel(server.grpc.address))

    def ask(asked: Sequence[tuple[str, str]]) -> None:
        items = [wire.Item(question=question, answer=answer) for question, answer in asked]
        stub.Score(wire.ScoreRequest(items=items), timeout=600)

    return ask


class _Pace(NamedTuple):
    per_second: float
    per_cpu_second: float


def _paced(work: Callable[[], object]) -> _Pace:
    """Return how many answers were scored in a second."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return _Pace(ANSWERS / (time.perf_counter() - wall), ANSWERS / (time.process_time() - cpu))


def _measured(scorer: Scorer, ask: Ask, size: int) -> dict[str, float]:
    """Return medians over rounds, both sides in turn, after one that makes everything ready."""
    direct: list[_Pace] = []
    served: list[_Pace] = []
    delays: list[float] = []

    def timed(first: int) -> float:
        start = time.perf_counter()
        ask([_asked(first + k) for k in range(size)])
        return time.perf_counter() - start

    def all_of_them() -> None:
        delays.extend(pool.map(timed, range(0, ANSWERS, size)))

    with ThreadPoolExecutor(CLIENTS) as pool:
        for _ in range(ROUNDS + 1):
            direct.append(_paced(lambda: _direct(scorer)))
            served.append(_paced(all_of_them))
    quantiles = statistics.quantiles(delays[ANSWERS // size :], n=100)
    both = list(zip(direct, served, strict=True))[1:]
    return {
        "requests_per_second": statistics.median(b.per_second for _, b in both) / size,
        "answers_per_second": statistics.median(b.per_second for _, b in both),
        "of_the_scorers_own": statistics.median(b.per_second / a.per_second for a, b in both),
        "of_the_scorers_own_by_cpu_seconds": statistics.median(
            b.per_cpu_second / a.per_cpu_second for a, b in both
        ),
        "p50_ms": 1000 * quantiles[49],
        "p99_ms": 1000 * quantiles[98],
    }
