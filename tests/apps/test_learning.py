"""Teams learn in episode states of the real packages verifiers, openenv-core and inspect_ai (`make test-apps`)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml
from tests.support.ranks import free_port
from tests.support.tiny import frozen_copy, same_bits

from kapelle.training.observer import Silent
from kapelle.training.trainer import Trainer

pytestmark = pytest.mark.apps

ROOT = Path(__file__).parents[2]
WORLDS = ROOT / "examples" / "worlds"
TRAINED = ("buyer", "clerk")


@pytest.fixture
def shop() -> Iterator[str]:
    """The address of the example's server, a process of its own."""
    pytest.importorskip("openenv.core")
    port = free_port()
    server = subprocess.Popen([sys.executable, str(WORLDS / "openenv_orders.py"), str(port)])
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert server.poll() is None, "the server ended"
            try:
                urlopen(f"{address}/health")  # noqa: S310 - an address of our own
            except URLError:
                time.sleep(0.05)
            else:
                break
        yield address
    finally:
        server.kill()
        server.wait()


def learn(world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Train the example's recipe in one of its episode states, and hold it to what learning is."""
    monkeypatch.setenv("KAPELLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    recipe: dict[str, Any] = {}
    for name in ("recipe", world):
        recipe |= yaml.safe_load((WORLDS / f"{name}.yaml").read_text("utf-8"))
    recipe.pop("description")
    recipe["environment"] |= more
    rewards: list[float] = []
    spoke: dict[str, set[str]] = {}
    with Trainer(**recipe, observer=Silent()) as trainer:
        base = trainer.models["base"].base_parameters()
        first = {"base": frozen_copy(base), **{a: frozen_copy(trainer.engine.weights(a)) for a in TRAINED}}
        for step in trainer.steps():
            played = [episode for group in step.groups for episode in group.episodes]
            assert [episode.error for episode in played] == [None] * len(played)
            rewards.append(sum(episode.total("clerk") for episode in played) / len(played))
            for turn in [turn for episode in played for turn in episode.turns]:
                spoke.setdefault(turn.agent, set()).add(turn.weights_hash)
        last = {"base": frozen_copy(base), **{a: frozen_copy(trainer.engine.weights(a)) for a in TRAINED}}
    before, after = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    told = ", ".join(f"{reward:.2f}" for reward in rewards)
    print(f"{world}: {before:.2f} before, {after:.2f} after ({told})")  # noqa: T201 - experiments/log.md has these; pytest -rP shows them
    assert after > before + 0.15, rewards
    # The frozen checker speaks by the base, which is bitwise the same; each other agent by an adapter a step.
    said_by = {agent: len(weights) for agent, weights in spoke.items()}
    assert said_by == {"buyer": len(rewards), "checker": 1, "clerk": len(rewards)}
    assert {name for name in first if not same_bits(first[name], last[name])} == set(TRAINED)


def test_a_team_learns_what_a_rubric_of_verifiers_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verifiers")
    monkeypatch.syspath_prepend(str(WORLDS))
    learn("verifiers", tmp_path, monkeypatch)


def test_a_team_learns_on_a_server_of_openenv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shop: str
) -> None:
    learn("openenv", tmp_path, monkeypatch, url=shop)


def test_a_team_learns_what_a_scorer_of_inspect_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("inspect_ai")
    learn("inspect", tmp_path, monkeypatch)
