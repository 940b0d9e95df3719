"""A past self as an opponent: an adapter that a run saved plays a seat and learns no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.resumed import resumed
from tests.support.tiny import frozen_copy, same_bits

from kapelle import Trainer
from kapelle.models.weights import read_adapter

GAME: dict[str, Any] = {
    "model": {"embedded": {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32}},
    "environment": {"name": "tests.support.plugins:Digest"},
    "workflow": {"name": "parallel"},
    "algorithm": {"name": "grpo", "group_size": 4, "team_reward": "individual"},
    "training": {"steps": 2, "tasks_per_step": 2},
    "optimizer": {"lr": 1e-2},
    "evaluation": {"before_and_after": False},
    "checkpoint": {"every": 1, "keep": 3},
}


def against(past: Path, **team: Any) -> dict[str, Any]:
    agents = [{"name": "first"}, {"name": "second", "weights": {"past": str(past)}}]
    return {**GAME, "team": {"agents": agents, "sampling": {"max_tokens": 3}, **team}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    team = {"agents": [{"name": "first"}, {"name": "second"}], "sampling": {"max_tokens": 3}}
    with Trainer(**GAME, team=team, run_dir=tmp_path / "run") as trainer:
        trainer.train()
    return tmp_path / "run"


def played_by(trainer: Trainer) -> dict[str, Any]:
    return dict(sorted(frozen_copy(trainer.engine.weights("second")).items()))


def test_it_plays_as_it_was_saved_and_stays_so(run: Path) -> None:
    past = run / "checkpoints" / "00000001" / "policies" / "second"
    saved = read_adapter(past)[0]
    with Trainer(**against(past)) as trainer:
        assert same_bits(played_by(trainer), dict(sorted(saved.items())))
        steps = list(trainer.steps())
        assert same_bits(played_by(trainer), dict(sorted(saved.items())))
        turns = [t for g in steps[-1].groups for e in g.episodes for t in e.by("second")]
        assert {t.trained for t in turns} == {False}
        assert "loss/first" in steps[0].metrics
        assert "loss/second" not in steps[0].metrics


def test_a_run_against_it_resumes_bit_for_bit(run: Path, tmp_path: Path) -> None:
    settings = against(run / "checkpoints" / "00000002" / "policies" / "second")
    with Trainer(**settings) as whole:
        whole.train()
        expected = frozen_copy(whole.engine.weights("first"))
    with resumed(settings, tmp_path / "again", after=1) as second:
        assert same_bits(frozen_copy(second.engine.weights("first")), expected)
