"""An entropy bonus for single agents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.tiny import same_bits

from kapelle import Trainer
from kapelle.algorithm import Loss, Outputs, Targets
from kapelle.errors import ConfigError
from kapelle.features.entropy.feature import BONUS, WithBonus

SIZE = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 64, "context": 256}


def given(**over: Any) -> dict[str, Any]:
    return {
        "model": {"path": "embedded", "embedded": SIZE},
        "environment": {"name": "arithmetic"},
        "workflow": {"name": "chain"},
        "team": {"agents": [{"name": "a"}, {"name": "b"}], "sampling": {"max_tokens": 4}},
        "algorithm": {"name": "grpo", "group_size": 2, "scale": "none"},
        "training": {"steps": 2, "tasks_per_step": 2},
        "evaluation": {"before_and_after": False},
        "optimizer": {"lr": 1e-2},
        **over,
    }


def test_the_loss_falls_by_each_tokens_entropy_times_its_weight() -> None:
    targets = Targets(
        torch.tensor([0, 0, 1]), 2, torch.tensor([1.0, 0.0, 1.0]), {BONUS: torch.tensor([0.5, 0.5, 0.0])}
    )
    outputs = Outputs(torch.zeros(3), torch.tensor([2.0, 3.0, 4.0], requires_grad=True))
    loss = WithBonus(lambda outputs, targets: Loss(outputs.logp_K.sum(), torch.tensor(2.0)))(outputs, targets)
    assert loss.total.item() == -1.0
    assert outputs.entropy_K is not None
    (gradient,) = torch.autograd.grad(loss.total, outputs.entropy_K)
    assert gradient.tolist() == [-0.5, 0.0, 0.0]


def test_a_bonus_moves_its_agent_alone_and_ends_with_the_run() -> None:
    weights, shown = {}, []
    for name, entropy in {"with": {"agents": {"a": {"start": 0.5, "end": 0.1}}}, "without": None}.items():
        with Trainer(**given(entropy=entropy)) as trainer:
            for step in trainer.steps():
                shown.append(step.metrics.get("entropy_bonus/a"))
                if step.number == 1:
                    weights[name] = {
                        agent: {key: own.clone() for key, own in trainer.engine.weights(agent).items()}
                        for agent in ("a", "b")
                    }
    assert shown == [0.5, pytest.approx(0.3), None, None]
    assert same_bits(weights["with"]["b"], weights["without"]["b"])
    assert not same_bits(weights["with"]["a"], weights["without"]["a"])


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({}, "names 'c', which is not an agent"),
        ({"team": {"agents": [{"name": "c", "weights": "frozen"}, {"name": "b"}]}}, "which is not trained"),
    ],
)
def test_an_agent_that_is_not_trained_is_an_error_before_a_model_loads(
    over: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(**given(entropy={"agents": {"c": {"start": 0.1}}}, **over))
