"""Gradient checkpointing: the same step bitwise, from less memory."""

from __future__ import annotations

import pytest
import torch
from tests.support.tiny import (
    draw_samples,
    frozen_copy,
    same_bits,
    tiny_model,
    train_engine,
    with_behaviour,
    with_columns,
)
from torch import Tensor

from kapelle.algorithms.shared.surrogate import SurrogateConfig, ValueLossConfig
from kapelle.engines.train.protocol import Objective, UpdateLimits
from kapelle.team import Critic, Lora, Policy

OBJECTIVE = Objective(SurrogateConfig().build(), ValueLossConfig().build(), 0.5)
LORA = Lora(rank=2, alpha=4.0, dropout=0.2)


def updated(*, checkpointed: bool, dtype: str, padded: bool) -> dict[str, dict[str, Tensor]]:
    """Weights of two adapters with dropout, a critic and a whole model after two updates in several passes."""
    models = {"base": tiny_model(dtype=dtype, size=0.1), "own": tiny_model(1, dtype=dtype, size=0.1)}
    for model in models.values():
        model.flat = None if padded else model.flat
    policies = [Policy("a", lora=LORA), Policy("b", lora=LORA), Policy("whole", base="own")]
    limits = UpdateLimits(microbatch_tokens=40, gradient_checkpointing=checkpointed)
    engine = train_engine(policies, [Critic("v", lora=LORA)], models=models, limits=limits, eps=1e-3)
    samples = draw_samples(["a", "b", "whole"], [(3, 5), (7, 2), (3, 5)])
    values = draw_samples(["v"], [(3, 5)])
    values = with_columns(values, **{"return": [torch.ones(5)], "value": [torch.zeros(5)]})
    for _ in range(2):
        engine.update(with_behaviour(engine, samples) + values, OBJECTIVE)
    return {name: frozen_copy(engine.weights(name)) for name in ("a", "b", "whole", "v")}


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["flat", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_takes_the_same_step_exactly(dtype: str, padded: bool) -> None:
    plain, again = (updated(checkpointed=on, dtype=dtype, padded=padded) for on in (False, True))
    assert same_bits(plain, again)
