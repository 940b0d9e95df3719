"""Rollouts that run ahead: whose words a step learns from, and that a resumed run has them still."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.episodes import episode, group, turn
from tests.support.tiny import frozen_copy, same_bits

from kapelle import Trainer
from kapelle.errors import ParityError
from kapelle.features.ahead.staleness import Versions

SMALL: dict[str, Any] = {
    "model": {"embedded": {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32}},
    "environment": {"name": "tests.support.plugins:Digest"},
    "workflow": {"name": "parallel"},
    "team": {"agents": 2, "sampling": {"max_tokens": 3}},
    "training": {"steps": 5, "tasks_per_step": 2, "max_staleness": 2},
    "optimizer": {"lr": 1e-2},
    "evaluation": {"before_and_after": False},
}
PPO = {"name": "ippo", "gae": {"vtrace": True}, "loss": {"importance_cap": 2.0}}


def test_weights_that_are_too_old_or_were_never_published_are_found() -> None:
    versions = Versions(2)
    for version in range(5):
        versions.append({"a": version})
    ages = [versions.staleness([group(episode(turn("a", 0, version=version)))]) for version in (4, 3, 2)]
    assert ages == [0.0, 1.0, 2.0]
    mixed = replace(
        turn("a", 0, version=4), completion_ids=(1, 2, 3, 4), versions=((2, 1), (4, 3)), logprobs=(-1.0,) * 4
    )
    assert versions.staleness([group(episode(mixed))]) == 0.5
    versions.check([group(episode(mixed))])
    for version, only_current in ((1, False), (5, False), (3, True)):
        with pytest.raises(
            ParityError, match=f"version {version} of policy 'a', but version 4 was published"
        ):
            versions.check([group(episode(turn("a", 0, version=version)))], only_current=only_current)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [PPO, {"name": "grpo", "group_size": 2, "loss": {"importance_cap": 2.0}}]
)
def test_a_resumed_run_learns_from_the_same_old_words(algorithm: dict[str, Any], tmp_path: Path) -> None:
    with Trainer(**SMALL, algorithm=algorithm, run_dir=tmp_path / "whole") as whole:
        rows = [step.metrics for step in whole.steps()]
        expected = {name: frozen_copy(whole.engine.weights(name)) for name in whole.team.trained}
    assert [row["staleness"] for row in rows] == [0.0, 1.0, 2.0, 2.0, 2.0]
    # Old words weigh differently from new ones: the corrections have something to correct.
    assert rows[0]["importance/agent_0"] == pytest.approx(1.0, abs=1e-4)
    assert abs(rows[4]["importance/agent_0"] - 1.0) > 1e-4
    with Trainer(**SMALL, algorithm=algorithm, run_dir=tmp_path / "parts") as first:
        first.train(3)
    with Trainer(**SMALL, algorithm=algorithm, run_dir=tmp_path / "parts", resume=True) as second:
        second.train()
        for name, weights in expected.items():
            assert same_bits(frozen_copy(second.engine.weights(name)), weights)
