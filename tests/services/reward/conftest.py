"""A verifier of a tiny run, and its server on a free port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from tests.support.tiny import sections

from kapelle.runtime.wire import reward_v1_pb2_grpc as methods
from kapelle.services.binding import Binding
from kapelle.services.reward.scores import Scorer, verifier_scorer
from kapelle.services.reward.service import RewardLimits, RunningRewardServer, serve_reward
from kapelle.training.observer import Silent
from kapelle.training.served import open_verifier
from kapelle.training.trainer import Trainer


@pytest.fixture(scope="package")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a verifier that took two steps."""
    run = tmp_path_factory.mktemp("judge")
    given = sections(
        environment={"name": "tests.support.copies:Copies", "letters": 3},
        workflow={"name": "solo"},
        algorithm={"name": "verifier", "data": "recorded", "group_size": 6},
        team={"sharing": "frozen", "agents": 1, "critic_lora": {"rank": 2}},
        training={"steps": 2, "tasks_per_step": 8},
        optimizer={"lr": 0.05},
        evaluation={"problems": 6, "before_and_after": False},
        checkpoint={"every": 2},
    )
    with Trainer(**given, run_dir=run) as trainer:
        trainer.train()
    return run


@pytest.fixture(scope="package")
def scorer(judge: Path) -> Scorer:
    return verifier_scorer(*open_verifier(judge, Silent()))


@pytest.fixture(scope="package")
def server(scorer: Scorer) -> Iterator[RunningRewardServer]:
    with serve_reward(scorer, Binding(), RewardLimits(batch=8), grpc_port=0) as served:
        yield served


@pytest.fixture(scope="package")
def stub(server: RunningRewardServer) -> Iterator[methods.RewardStub]:
    assert server.grpc is not None
    with grpc.insecure_channel(server.grpc.address) as channel:
        yield methods.RewardStub(channel)


@pytest.fixture(scope="package")
def web() -> Iterator[httpx.Client]:
    """A client that does as it is told; making one takes long."""
    with httpx.Client(timeout=60.0) as made:
        yield made
