"""An update of one set of weights leaves every other bitwise as it was."""

from __future__ import annotations

import copy

import pytest
from tests.engines.train.torch.test_engine import critic_samples, drawn, objective
from tests.support.tiny import (
    LORA,
    frozen_copy,
    lora_policies,
    same_bits,
    tiny_model,
    train_engine,
    with_behaviour,
)

from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.team import Critic, Policy, reference_name


class TestIsolation:
    @pytest.fixture
    def engine(self) -> TorchTrainEngine:
        """Two bases, five learners and a frozen policy, all with momentum and weight decay."""
        models = {"base": tiny_model(), "own": tiny_model(seed=3)}
        policies = [
            *lora_policies("a", "b"),
            Policy("whole", base="own"),
            Policy("frozen", trained=False),
        ]
        critics = [Critic("va", lora=LORA), Critic("vb", lora=LORA)]
        engine = train_engine(policies, critics, models=models, references=True, weight_decay=0.1)
        names = ["a", "b", "whole"]
        for seed in range(3):
            samples = with_behaviour(engine, drawn(names, seed)) + critic_samples(["va", "vb"], seed)
            engine.update(samples, objective())
        return engine

    @pytest.mark.sample(4)
    @pytest.mark.parametrize("moving", ["a", "b", "whole", "va", "vb"])
    def test_only_learners_change(self, engine: TorchTrainEngine, moving: str) -> None:
        kept = ["frozen", *(reference_name(name) for name in ("a", "b", "whole"))]
        learners = copy.deepcopy({name: one.state() for name, one in engine.learners.items()})
        weights = {name: frozen_copy(engine.weights(name)) for name in kept}
        engine.publish()
        for seed in range(3):
            samples = critic_samples([moving], seed) if moving.startswith("v") else drawn([moving], seed)
            if not moving.startswith("v"):
                samples = with_behaviour(engine, samples)
            engine.update(samples, objective(epochs=2, minibatches=2))
        for name, one in engine.learners.items():
            assert same_bits(one.state(), learners[name]) == (name != moving), name
        for name in kept:
            assert same_bits(frozen_copy(engine.weights(name)), weights[name]), name
        assert list(engine.publish()) == ([] if moving.startswith("v") else [moving])

    def test_names_that_begin_alike_are_not_confused(self) -> None:
        names = [f"agent_{k}" for k in (1, 10, 11, 2)]
        engine = train_engine(lora_policies(*names), weight_decay=0.1)
        before = {name: frozen_copy(engine.weights(name)) for name in names}
        engine.update(with_behaviour(engine, drawn(["agent_1"])), objective())
        changed = [n for n in names if not same_bits(frozen_copy(engine.weights(n)), before[n])]
        assert changed == ["agent_1"]
