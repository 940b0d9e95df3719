"""One learner's step: AdamW by hand, its schedule, its clipping, and what it does with bad gradients."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from tests.support.tiny import same_bits
from torch import nn
from torch.optim import SGD
from transformers import get_scheduler

from kapelle.engines.train.torch.learner import Learner, LossScale, _norm, rate_at, take_steps
from kapelle.errors import NumericsError
from kapelle.settings.schema import OptimizerConfig


def learner(*values: float, total: int = 10, scaled: bool = False, **settings: object) -> Learner:
    config = OptimizerConfig.model_validate({"max_grad_norm": None, "lr": 0.1, **settings})
    weights = {f"w{k}": nn.Parameter(torch.tensor([value])) for k, value in enumerate(values)}
    return Learner("actor", weights, config, config.lr, total, scaled)


def push(one: Learner, *gradients: float, weight: float = 1.0, on_bad: str = "stop") -> dict[str, float]:
    """Accumulate these gradients of sums, one per weight, and step."""
    pairs = zip(one.parameters.values(), gradients, strict=True)
    one.scaled(torch.stack([(p * g).sum() for p, g in pairs]).sum()).backward()
    return one.step(weight, on_bad)


def values(one: Learner) -> list[float]:
    return [p.item() for p in one.parameters.values()]


class TestAdamW:
    def test_two_steps_by_hand(self) -> None:
        # g = 3/2: w ← 1·(1 − 0.1·0.01) − 0.1·1.5/√1.5² = 0.899
        one = learner(1.0, weight_decay=0.01)
        push(one, 3.0, weight=2.0)
        assert values(one) == pytest.approx([0.899], abs=1e-6)
        # g = −0.5: m = 0.9·0.15 + 0.1·(−0.5) = 0.085, m̂ = 0.085/0.19 = 0.4473684
        # v = 0.999·0.00225 + 0.001·0.25 = 0.00249775, v̂ = 0.00249775/0.001999 = 1.2494997
        # w ← 0.899·0.999 − 0.1·0.4473684/√1.2494997 = 0.898101 − 0.0400218 = 0.8580792
        push(one, -0.5)
        assert values(one) == pytest.approx([0.8580792], abs=1e-6)
        assert one.steps == 2


class TestClipping:
    def test_the_norm_over_all_weights_is_bounded(self) -> None:
        one = learner(1.0, 1.0, max_grad_norm=1.0)
        metrics = push(one, 30.0, 40.0, weight=10.0)
        assert metrics["grad_norm"] == pytest.approx(5.0)  # of 3 and 4, before clipping
        moments = one.state()["optimizer"]
        kept = [float(moments[name]["exp_avg"]) / 0.1 for name in ("w0", "w1")]
        assert kept == pytest.approx([0.6, 0.8], abs=1e-5)

    def test_a_smaller_gradient_is_not_enlarged(self) -> None:
        one = learner(1.0, 1.0, max_grad_norm=1.0)
        assert push(one, 0.3, 0.4)["grad_norm"] == pytest.approx(0.5)
        moments = one.state()["optimizer"]
        assert [float(moments[name]["exp_avg"]) for name in ("w0", "w1")] == pytest.approx([0.03, 0.04])

    def test_the_norm_is_that_of_all_kinds_of_tensors_together(self) -> None:
        # As of shards and of the whole head of a critic.
        kinds = [{"w0": torch.tensor([3.0])}, {"w1": torch.tensor([4.0])}]
        assert float(_norm(kinds)) == pytest.approx(5.0)


class TestSchedules:
    @pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
    def test_rates_are_those_of_transformers(self, name: Literal["constant", "linear", "cosine"]) -> None:
        settings = OptimizerConfig(schedule=name, warmup_steps=3)
        theirs = get_scheduler(
            name if name != "constant" else "constant_with_warmup", SGD([torch.zeros(1)], 1.0), 3, 10
        )
        for k in range(10):
            assert rate_at(k, 10, settings) == pytest.approx(theirs.get_last_lr()[0])
            theirs.optimizer.step()
            theirs.step()


class TestBadGradients:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_stop_names_the_learner_and_moves_nothing(self, bad: float) -> None:
        one = learner(1.0, 2.0)
        push(one, 1.0, 1.0)
        before = values(one)
        with pytest.raises(NumericsError, match=r"'actor'.*update 1"):
            push(one, 1.0, bad)
        assert values(one) == before
        assert one.steps == 1

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_skip_is_as_if_the_step_had_never_been(self, bad: float) -> None:
        one, other = learner(1.0, 2.0), learner(1.0, 2.0)
        push(one, 1.0, 1.0)
        one.changed = False
        metrics = push(one, 1.0, bad, on_bad="skip")
        assert metrics["skipped"] == 1.0
        assert all(math.isfinite(value) for value in metrics.values())
        assert not one.changed
        push(one, 0.5, 0.5)
        push(other, 1.0, 1.0)
        push(other, 0.5, 0.5)
        assert same_bits(one.state(), other.state())

    @pytest.mark.parametrize("settled", ["before", "after"])
    def test_each_of_several_learners_counts_its_own_steps(self, settled: str) -> None:
        good, bad = learner(1.0), learner(1.0)
        for one, gradient in ((good, 1.0), (bad, math.nan)):
            (one.parameters["w0"] * gradient).sum().backward()
        order = [good, bad] if settled == "before" else [bad, good]
        with pytest.raises(NumericsError, match="gradient of 'actor' is not finite at its update 0"):
            take_steps(dict.fromkeys(order, 1.0), "stop")
        assert [(one.steps, one.version, one.changed) for one in (good, bad)] == [(1, 1, True), (0, 0, False)]
        assert values(good) == pytest.approx([0.9])
        assert values(bad) == [1.0]


class TestLossScale:
    def test_consecutive_finite_steps_double_it(self) -> None:
        scale = LossScale()
        for finite in [True] * (LossScale.GROWS_AFTER - 1) + [False] + [True] * (LossScale.GROWS_AFTER - 1):
            scale.follow(finite=finite)
        assert scale.scale == LossScale.FIRST / 2
        scale.follow(finite=True)
        assert scale.scale == LossScale.FIRST

    def test_the_step_does_not_depend_on_it(self) -> None:
        plain, scaled = learner(1.0), learner(1.0, scaled=True)
        for gradient in (1.0, -0.25):
            assert push(plain, gradient)["grad_norm"] == push(scaled, gradient)["grad_norm"] == abs(gradient)
        assert values(scaled) == pytest.approx(values(plain), abs=1e-6)
        assert float(scaled.scaled(torch.ones(()))) == 65536.0

    def test_an_overflow_halves_it_and_skips(self) -> None:
        one = learner(1.0, scaled=True)
        push(one, 1.0)
        before = values(one)
        metrics = push(one, math.inf)  # with on_bad "stop": the scale adapts by such steps
        assert metrics["skipped"] == 1.0
        assert values(one) == before
        assert one.steps == 1
        assert float(one.scaled(torch.ones(()))) == 32768.0
