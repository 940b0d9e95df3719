"""A team that is served on a free port, and OpenAI's own client to talk with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from tests.support.tiny import sections, stir

from kapelle.rollout.setup import RolloutSetup
from kapelle.services.binding import Binding
from kapelle.services.policy.service import PolicyServer, ServingLimits, serve_policy
from kapelle.training.trainer import Trainer


@pytest.fixture(scope="package")
def setup() -> Iterator[RolloutSetup]:
    """Two agents that debate, `first` and `second`, each with its own adapter."""
    agents = [{"name": "first", "system": "You speak first."}, {"name": "second"}]
    team = {**sections()["team"], "agents": agents}
    with Trainer(**sections(team=team)) as trainer:
        for seed, name in enumerate(trainer.team.trained):
            model = trainer.models[trainer.team.policies[name].base]
            stir(model.bank.parameters(name), seed)
            trainer.setup.engine.load(name, model.bank.parameters(name), version=7)
        yield trainer.setup


@pytest.fixture(scope="package")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of rewarded sessions."""
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="package")
def server(setup: RolloutSetup, recorded: Path) -> Iterator[PolicyServer]:
    """The team, served as `duo` and recorded."""
    with serve_policy(setup, "duo", Binding(), ServingLimits(), recorded) as served:
        yield served


@pytest.fixture(scope="package")
def client(server: PolicyServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60.0) as made:
        yield made


@pytest.fixture(scope="package")
def web() -> Iterator[httpx.Client]:
    """An HTTP client; creating one takes long."""
    with httpx.Client(timeout=60.0) as made:
        yield made
