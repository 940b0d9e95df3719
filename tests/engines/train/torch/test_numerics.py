"""Numbers that are not finite, half precision, and critics."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.tiny import (
    LORA,
    draw_samples,
    frozen_copy,
    lora_policies,
    same_bits,
    tiny_model,
    train_engine,
    with_behaviour,
    with_columns,
)

from kapelle.algorithms.shared.surrogate import SurrogateConfig, ValueLossConfig
from kapelle.engines.train.protocol import Objective, UpdateLimits
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.rows import Sample
from kapelle.team import Critic, Policy

OBJECTIVE = Objective(SurrogateConfig().build(), ValueLossConfig().build(), 0.5)
LENGTHS = [(3, 5), (7, 2), (1, 9), (12, 4)]


def ready(engine: TorchTrainEngine, *names: str) -> list[Sample]:
    return with_behaviour(engine, draw_samples(names, LENGTHS))


def spoiled(samples: list[Sample], learner: str, value: float = math.nan) -> list[Sample]:
    """The same samples with one advantage of one learner that is not a number."""
    columns = [s.columns["advantage"].clone() for s in samples]
    place = next(k for k, s in enumerate(samples) if s.learner == learner)
    columns[place][0] = value
    return with_columns(samples, advantage=columns)


def masked(samples: list[Sample], learner: str) -> list[Sample]:
    """The same samples, of which one learner learns nothing: its rows are computed beside the others', whose products round alike."""
    return [
        Sample(s.learner, s.tokens, s.targets, s.columns, torch.zeros(len(s.targets)))
        if s.learner == learner
        else s
        for s in samples
    ]


class TestNotFinite:
    @pytest.mark.parametrize("budget", [1, 100_000])
    def test_a_skipped_learner_misses_the_step_alone(self, budget: int) -> None:
        limits = UpdateLimits(microbatch_tokens=budget, non_finite="skip")
        engine, other = (train_engine(lora_policies("a", "b"), limits=limits) for _ in range(2))
        samples = ready(engine, "a", "b")
        metrics = engine.update(spoiled(samples, "b"), OBJECTIVE)
        # All of b's step is omitted, the microbatches without the fault too.
        assert metrics["skipped/b"] == 1.0
        assert metrics["skipped/a"] == 0.0
        assert "loss/b" not in metrics
        assert all(math.isfinite(value) for value in metrics.values())
        alone = [s for s in samples if s.learner == "a"]
        other.update(alone if budget == 1 else masked(samples, "b"), OBJECTIVE)
        assert same_bits(engine.state(), other.state())
        # And the next step starts from nothing.
        engine.update(ready(engine, "a", "b"), OBJECTIVE)
        other.update(ready(other, "a", "b"), OBJECTIVE)
        assert same_bits(engine.state(), other.state())

    def test_a_learner_with_only_masked_tokens_does_not_change(self) -> None:
        engine = train_engine(lora_policies("a", "b"), weight_decay=0.1)
        before = frozen_copy(engine.weights("b"))
        samples = [
            Sample(s.learner, s.tokens, s.targets, s.columns, torch.zeros(len(s.targets)))
            if s.learner == "b"
            else s
            for s in ready(engine, "a", "b")
        ]
        engine.update(samples, OBJECTIVE)
        assert same_bits(frozen_copy(engine.weights("b")), before)
        assert engine.versions == {"a": 1, "b": 0}


# torch tells that it has no fused norm for mixed types; the plain one is what runs.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
class TestHalfPrecision:
    @pytest.mark.sample(2)
    @pytest.mark.slow
    @pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.25), ("float16", 0.1)])
    def test_it_trains_weights_that_stay_in_float32(self, dtype: str, bound: float) -> None:
        policies = [*lora_policies("a"), Policy("whole", base="own")]
        models = {"base": tiny_model(dtype=dtype, size=0.1), "own": tiny_model(3, dtype=dtype, size=0.1)}
        engine = train_engine(policies, [Critic("v", lora=LORA)], models=models)
        before = {name: frozen_copy(engine.weights(name)) for name in ("a", "whole", "v")}
        values = [
            Sample("v", s.tokens, s.targets, {"return": torch.ones(n), "value": torch.zeros(n)})
            for s in draw_samples(["v"], LENGTHS)
            for n in [len(s.targets)]
        ]
        rows = [engine.update(ready(engine, "a", "whole") + values, OBJECTIVE) for _ in range(12)]
        assert all(row["parity/max"] < bound for row in rows)
        assert all(math.isfinite(value) for row in rows for value in row.values())
        # float16 may need a few steps to find its loss scale.
        assert [rows[-1][f"skipped/{name}"] for name in ("a", "whole", "v")] == [0.0, 0.0, 0.0]
        for name, weights in before.items():
            after = engine.weights(name)
            assert {tensor.dtype for tensor in after.values()} == {torch.float32}
            assert not same_bits(frozen_copy(after), weights)

    def test_float16_recovers_from_a_loss_scale_that_is_too_large(self) -> None:
        engine = train_engine(
            lora_policies("a"),
            models={"base": tiny_model(dtype="float16", size=0.1)},
            limits=UpdateLimits(parity_tolerance=100.0),
        )
        samples = ready(engine, "a")
        loud = with_columns(samples, advantage=[s.columns["advantage"] * 1e5 for s in samples])
        skipped = [engine.update(loud, OBJECTIVE)["skipped/a"] for _ in range(30)]
        assert skipped[0] == 1.0
        assert skipped[-1] == 0.0
        assert engine.versions["a"] == skipped.count(0.0)


class TestCritics:
    def test_the_place_after_the_last_token_can_be_requested(self) -> None:
        engine = train_engine(lora_policies("a"), [Critic("v", lora=LORA)])
        head = engine.weights("v")["value_head.weight"]
        with torch.no_grad():
            head.fill_(1.0)
        (whole,) = draw_samples(["v"], [(3, 5)])
        longer = Sample("v", (*whole.tokens, 77), (*whole.targets, 8))
        after = Sample("v", whole.tokens, (8,))
        inside, last = engine.score([longer, after])
        # The value before the next token is the value after all of these, whatever the next one is.
        assert float(last) == pytest.approx(float(inside[-1]), abs=1e-6)

    @pytest.mark.parametrize("moving", ["policy", "critic"])
    def test_an_adapter_on_a_frozen_copy_is_independent_of_the_trained_base(self, moving: str) -> None:
        models = {"base": tiny_model(), "base@critic": tiny_model()}
        engine = train_engine([Policy("shared")], [Critic("v", "base@critic", LORA)], models=models)
        policy = ready(engine, "shared")
        critic = draw_samples(["v"], LENGTHS)
        ones = [torch.ones(len(s.targets)) for s in critic]
        critic = with_columns(critic, **{"return": ones, "value": [0 * one for one in ones]})
        values, logp = engine.score(critic), engine.score(policy)
        engine.update(policy if moving == "policy" else critic, OBJECTIVE)
        assert same_bits(engine.score(critic), values) == (moving == "policy")
        assert same_bits(engine.score(policy), logp) == (moving == "critic")
