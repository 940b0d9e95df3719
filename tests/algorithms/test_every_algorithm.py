"""Every built-in algorithm trains a team through the whole library, and a resumed run is bitwise identical."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import frozen_copy, learners_of, same_bits

from kapelle import Trainer
from kapelle.algorithms import BUILTIN as ALGORITHMS
from kapelle.models.language_model import load_language_model
from kapelle.runs.reader import read_metrics
from kapelle.settings.schema import ModelConfig
from kapelle.team import VERIFIER

SETTINGS: dict[str, dict[str, Any]] = {
    "at_grpo": {"group_size": 2},
    "cory": {"swap_every": 2, "base": {"name": "rloo", "group_size": 2}},
    "distill": {"teacher": "teacher"},
    "dpo": {"group_size": 3},
    "gdpo": {"group_size": 2, "weights": {"thirds": 1.0, "sevenths": 0.5}},
    "grpo": {"group_size": 2, "redraw": 1},
    "maporl": {"group_size": 2},
    "qmix": {"group_size": 2, "credit_warmup_steps": 1, "fit": {"min_fill": 2, "updates": 2}},
    "self_distill": {"context": ["feedback"], "group_size": 2},
    "sft": {},
    "vdn": {"group_size": 2, "credit_warmup_steps": 1, "fit": {"min_fill": 2, "updates": 2}},
    "verifier": {"group_size": 2},
}
"""What an algorithm needs said beside its name; the others play groups of two."""


def run_of(name: str) -> dict[str, Any]:
    """Two agents that are paid for noise, two rounds each, three steps."""
    environment: dict[str, Any] = {"name": "tests.support.plugins:Digest"}
    if name == "sft":
        environment = {"name": "arithmetic", "digits": 1}
    elif name == "gdpo":
        environment = {"name": "tests.support.plugins:Counted"}
    sharing = {"ppo": "shared", "verifier": "frozen"}.get(name, "lora")
    workflow = (
        {"name": "cory"}
        if name == "cory"
        else {"name": "debate", "rounds": 2, "score_rounds": name in {"mada_rl", "maporl", "verifier"}}
    )
    return {
        "model": {"embedded": {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32}},
        "environment": environment,
        "workflow": workflow,
        "team": {"agents": 2, "sharing": sharing, "sampling": {"max_tokens": 3}},
        "algorithm": {"name": name, **SETTINGS.get(name, {"group_size": 2})},
        "training": {"steps": 3, "tasks_per_step": 2},
        "optimizer": {"lr": 1e-2},
        "evaluation": {"before_and_after": False, "problems": 8},
        "checkpoint": {"every": 10},
    }


def learned(trainer: Trainer) -> dict[str, Any]:
    return {name: frozen_copy(learner.parameters) for name, learner in learners_of(trainer.engine).items()}


@pytest.mark.sample(7)
@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_learns_and_a_resumed_run_is_bitwise_identical(name: str, tmp_path: Path) -> None:
    settings = run_of(name)
    if name == "distill":
        another = {"embedded": {**settings["model"]["embedded"], "seed": 9}}
        settings["models"] = {"teacher": load_language_model(ModelConfig.model_validate(another))}
    with Trainer(**settings) as whole:
        before = learned(whole)
        whole.train()
        expected = learned(whole)
    assert expected
    assert any(not same_bits(before[each], expected[each]) for each in expected)
    with Trainer(**settings, run_dir=tmp_path / "run") as first:
        first.train(2)
    with Trainer(**settings, run_dir=tmp_path / "run", resume=True) as second:
        second.train()
        assert same_bits(learned(second), expected)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        _says_how_it_learns(row, name)


def _says_how_it_learns(row: Mapping[str, float], name: str) -> None:
    """Every row holds each learner's vital signs, whatever the algorithm's coefficients."""
    learners = [key.removeprefix("grad_norm/") for key in row if key.startswith("grad_norm/")]
    critics = [learner for learner in learners if learner.startswith("critic:")]
    for policy in set(learners) - {*critics, VERIFIER}:
        assert row[f"entropy/{policy}"] > 0.0
        if name != "sft":  # what is demonstrated was sampled by no one
            assert 0.0 < row[f"effective_samples/{policy}"] <= 1.0 + 1e-6
            assert 0.0 <= row[f"ratio_tail/{policy}"] <= 1.0
    for critic in critics:
        assert row[f"explained_variance/{critic}"] <= 1.0
