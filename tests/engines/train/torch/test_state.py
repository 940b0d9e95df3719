"""What the train engine keeps: references, its state, and models that are in memory already."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.engines.train.torch.test_engine import (
    critic_samples,
    drawn,
    objective,
)
from tests.support.tiny import (
    LORA,
    lora_policies,
    same_bits,
    tiny_model,
    train_engine,
    with_behaviour,
    with_columns,
)

from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.train.protocol import Objective, UpdateLimits
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.team import Critic, Policy


class TestReferences:
    def test_a_penalty_to_it_pulls_back(self) -> None:
        engine = train_engine(lora_policies("a"), references=True, max_grad_norm=None)
        loss = SurrogateConfig(kl_coefficient=1.0, kl_estimator="k2").build()
        samples = with_behaviour(engine, drawn(["a"]))
        scored = engine.score(samples)
        silent = with_columns(
            samples,
            advantage=[torch.zeros_like(s) for s in scored],
            # The reference gave these tokens e^0.3 times the probability.
            reference=[s + 0.3 for s in scored],
        )
        metrics = engine.update(silent, Objective(loss))
        assert metrics["kl/a"] == pytest.approx(0.045, abs=1e-5)
        after = engine.score(samples)
        assert float(torch.cat(after).mean()) > float(torch.cat(scored).mean())


class TestState:
    @pytest.mark.slow
    def test_a_new_engine_continues_exactly(self) -> None:
        def fresh(seed: int) -> TorchTrainEngine:
            policies = [*lora_policies("a"), Policy("whole", base="own")]
            return train_engine(
                policies,
                [Critic("v", lora=LORA)],
                models={"base": tiny_model(), "own": tiny_model(seed=3)},
                references=True,
                weight_decay=0.1,
                schedule="linear",
                limits=UpdateLimits(total_steps=50),
                stirred=False,
                seed=seed,
            )

        def advance(engine: TorchTrainEngine, seed: int) -> None:
            samples = with_behaviour(engine, drawn(["a", "whole"], seed)) + critic_samples(["v"], seed)
            engine.update(samples, objective(epochs=2, minibatches=3))

        one = fresh(0)
        for seed in range(2):
            advance(one, seed)
        one.refresh_references()
        advance(one, 2)
        other = fresh(0)
        other.load_state(copy.deepcopy(one.state()))
        assert same_bits(one.state(), other.state())
        assert other.versions == {"a": 18, "whole": 18}
        for seed in range(3, 5):
            advance(one, seed)
            advance(other, seed)
        assert same_bits(one.state(), other.state())
