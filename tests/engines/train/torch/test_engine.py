"""The train engine against plain autograd, and each policy's step as if it were alone in the world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import pytest
import torch
from tests.support.tiny import (
    LORA,
    draw_samples,
    first_gradient,
    frozen_copy,
    lora_policies,
    model_of,
    related_samples,
    same_bits,
    tiny_model,
    train_engine,
    with_behaviour,
    with_columns,
)
from torch import Tensor

from kapelle.algorithm import Loss, Outputs, Targets
from kapelle.algorithms.shared.surrogate import SurrogateConfig, ValueLossConfig
from kapelle.engines.train.protocol import Objective, UpdateLimits
from kapelle.errors import ContextError
from kapelle.models.language_model import LanguageModel
from kapelle.rows import Sample
from kapelle.team import Critic, Lora, Policy, Rate

CLIPPED = SurrogateConfig().build()
VALUES = ValueLossConfig().build()
LENGTHS = [(3, 5), (7, 2), (1, 9), (12, 4), (5, 5), (2, 1)]
"""(prompt, completion) of the sequences of one learner that have nothing in common."""

ROUNDING = 6e-6
"""Most that two gradients in float32 are apart, relative to their length: each is some 1e-6 off from float64."""


def drawn(learners: Sequence[str], seed: int = 0, temperature: float = 1.0) -> list[Sample]:
    """Sequences of all lengths, apart and related."""
    apart = draw_samples(learners, LENGTHS, seed, temperature)
    related = related_samples(learners, seed, temperature)
    return [s for pair in zip_longest(apart, related) for s in pair if s is not None]


def critic_samples(learners: Sequence[str], seed: int = 0) -> list[Sample]:
    """Samples for critics, with random returns."""
    generator = torch.Generator().manual_seed(seed)
    samples = drawn(learners, seed)
    returns = [torch.randn(len(s.targets), generator=generator) for s in samples]
    zeros = [torch.zeros(len(s.targets)) for s in samples]
    return with_columns(samples, **{"return": returns, "value": zeros})


def objective(epochs: int = 1, minibatches: int = 1, *, parity: bool = True) -> Objective:
    return Objective(CLIPPED, VALUES, 0.5, epochs=epochs, minibatches=minibatches, parity=parity)


def logp_alone(model: LanguageModel, sample: Sample, adapter: str | None) -> Tensor:
    """Log-probs of one sequence by one plain pass of the transformers model, with gradient."""
    with model.bank.routed([(adapter, 0, 1)]):
        logits = model.model(input_ids=torch.tensor([sample.tokens]), use_cache=False).logits[0]
    logp = torch.log_softmax(logits / sample.temperature, -1)
    places = torch.tensor(sample.targets)
    token = torch.tensor(sample.tokens)[places]
    return logp[places - 1].gather(1, token[:, None]).squeeze(1)


def plain_gradient(
    model: LanguageModel,
    samples: Sequence[Sample],
    adapter: str | None,
    parameters: Mapping[str, torch.nn.Parameter],
) -> dict[str, Tensor]:
    """Gradient of −mean over all tokens of A·log π, sequence by sequence: PPO's on fresh weights."""
    total = torch.zeros(())
    for sample in samples:
        total = total - (logp_alone(model, sample, adapter) * sample.columns["advantage"]).sum()
    grads = torch.autograd.grad(total / sum(len(s.targets) for s in samples), list(parameters.values()))
    return dict(zip(parameters, grads, strict=True))


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Distance of two gradients over the length of the second."""
    assert one.keys() == other.keys()
    ours, theirs = (torch.cat([side[name].flatten() for name in one]) for side in (one, other))
    return float((ours - theirs).norm() / theirs.norm())


def base(*, flat: bool) -> LanguageModel:
    """A tiny base with or without the flat pass: without it `transformers` runs padded sequences."""
    model = tiny_model()
    model.flat = model.flat if flat else None
    return model


class TestGradient:
    @pytest.mark.sample(7)
    @pytest.mark.parametrize("budget", [1, 40, 100_000])
    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    @pytest.mark.parametrize("flat", [True, False])
    def test_packed_and_split_it_is_that_of_each_sequence_alone(
        self, budget: int, temperature: float, *, flat: bool
    ) -> None:
        engine = train_engine(
            lora_policies("a", "b"),
            models={"base": base(flat=flat)},
            limits=UpdateLimits(microbatch_tokens=budget),
            max_grad_norm=None,
        )
        model = model_of(engine, "a")
        samples = drawn(["a", "b"], temperature=temperature)
        expected = {
            name: plain_gradient(
                model, [s for s in samples if s.learner == name], name, model.bank.parameters(name)
            )
            for name in ("a", "b")
        }
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(3)).tolist()
        shuffled = [samples[k] for k in order]
        engine.update(with_behaviour(engine, shuffled), objective())
        for name in ("a", "b"):
            gradient = first_gradient(engine, name)
            assert apart(gradient, expected[name]) < ROUNDING
            assert max(float(g.abs().max()) for g in gradient.values()) > 1e-2

    def test_tokens_that_are_masked_out_do_not_count(self) -> None:
        engine = train_engine(lora_policies("a"), max_grad_norm=None)
        model = model_of(engine, "a")
        samples = drawn(["a"])
        masks = [(torch.arange(len(s.targets)) % 2 == 0).float() for s in samples]
        cut = [
            Sample(
                s.learner,
                s.tokens,
                tuple(t for t, m in zip(s.targets, mask, strict=True) if m),
                {"advantage": s.columns["advantage"][mask.bool()]},
            )
            for s, mask in zip(samples, masks, strict=True)
        ]
        expected = plain_gradient(model, cut, "a", model.bank.parameters("a"))
        behaved = with_behaviour(engine, samples)
        masked = [
            Sample(s.learner, s.tokens, s.targets, s.columns, mask)
            for s, mask in zip(behaved, masks, strict=True)
        ]
        engine.update(masked, objective())
        assert apart(first_gradient(engine, "a"), expected) < ROUNDING


class TestPolicyByPolicy:
    """A joint step over n policies equals each trained alone."""

    @staticmethod
    def trained(
        names: Sequence[str], *, exact: bool, rates: Mapping[str, Rate] | None = None, **optimizer: Any
    ) -> dict[str, dict[str, Tensor]]:
        of = rates or {}
        policies = [Policy(n, lora=LORA, rate=of.get(n, Rate())) for n in names if n != "v"]
        engine = train_engine(
            policies,
            [Critic("v", lora=LORA, rate=of.get("v", Rate()))] if "v" in names else [],
            # One row of one sequence at a time computes the very same floats in any company.
            limits=UpdateLimits(microbatch_tokens=1 if exact else 8192, total_steps=12),
            **optimizer,
            weight_decay=0.1,
            max_grad_norm=0.05,
            eps=1e-8 if exact else 1e-4,
        )
        lengths = [(3, 9)] * 6 if exact else LENGTHS
        for seed in range(3):
            samples: list[Sample] = []
            for number, name in enumerate(("a", "b", "c")):
                # In the second update b has nothing to learn from.
                if name in names and not (name == "b" and seed == 1):
                    scale = 100.0 if name == "c" else 1.0
                    own = draw_samples([name], lengths, 10 * seed + number)
                    own = with_columns(own, advantage=[s.columns["advantage"] * scale for s in own])
                    samples += with_behaviour(engine, own)
            if "v" in names:
                samples += critic_samples(["v"], seed)
            if samples:
                engine.update(samples, objective(epochs=2, minibatches=2))
        return {name: frozen_copy(engine.weights(name)) for name in names}

    @pytest.mark.slow
    def test_equal_exactly_where_the_same_floats_are_added(self) -> None:
        joint = self.trained(["a", "b", "c"], exact=True)
        assert same_bits(joint["b"], self.trained(["b"], exact=True)["b"])

    def test_clipping_bounds_each_policy_alone(self) -> None:
        engine = train_engine(lora_policies("loud", "quiet"), max_grad_norm=1.0)
        loud, quiet = drawn(["loud"]), drawn(["quiet"])
        loud = with_columns(loud, advantage=[s.columns["advantage"] * 1e3 for s in loud])
        quiet = with_columns(quiet, advantage=[s.columns["advantage"] * 1e-2 for s in quiet])
        metrics = engine.update(with_behaviour(engine, [*loud, *quiet]), objective())
        norms = {
            name: torch.cat([g.flatten() for g in first_gradient(engine, name).values()]).norm().item()
            for name in ("loud", "quiet")
        }
        assert metrics["grad_norm/loud"] > 10
        assert norms["loud"] == pytest.approx(1.0, abs=1e-4)
        assert norms["quiet"] == pytest.approx(metrics["grad_norm/quiet"], rel=1e-4)
        assert norms["quiet"] < 0.1


def test_the_loss_of_a_critic_is_multiplied_by_its_coefficient() -> None:
    norms = []
    for coefficient in (0.5, 2.0):
        engine = train_engine(lora_policies("a"), [Critic("v", lora=LORA)])
        weighed = Objective(CLIPPED, VALUES, coefficient)
        norms.append(engine.update(critic_samples(["v"]), weighed)["grad_norm/v"])
    assert norms[1] == pytest.approx(4 * norms[0], rel=1e-4)


def test_every_pass_over_the_samples_is_divided_anew() -> None:
    engine = train_engine(lora_policies("a"))
    samples = with_behaviour(engine, draw_samples(["a"], [(2, 1)] * 12))
    samples = with_columns(samples, advantage=[torch.tensor([float(k)]) for k in range(12)])
    parts: list[frozenset[float]] = []

    def noted(outputs: Outputs, targets: Targets) -> Loss:
        parts.append(frozenset(targets["advantage"].tolist()))
        return CLIPPED(outputs, targets)

    for _ in range(2):
        engine.update(samples, Objective(noted, epochs=2, minibatches=2, parity=False))
    assert len(set(parts[::2])) == 4
    assert all(one | other == set(range(12)) for one, other in zip(parts[::2], parts[1::2], strict=True))


class TestParity:
    def test_dropout_depends_on_the_engines_seed_and_not_on_the_process(self) -> None:
        states = []
        for seed, drawn_before in ((0, 1), (0, 2), (1, 1)):
            torch.manual_seed(drawn_before)
            engine = train_engine([Policy("a", lora=Lora(rank=2, dropout=0.3))], seed=seed)
            kept = torch.get_rng_state()
            engine.update(with_behaviour(engine, drawn(["a"])), objective(epochs=2))
            assert torch.equal(torch.get_rng_state(), kept)
            states.append(engine.state())
        assert same_bits(states[0], states[1])
        assert not same_bits(states[0], states[2])

    def test_each_step_has_its_own_dropout(self) -> None:
        engine = train_engine([Policy("a", lora=Lora(rank=2, dropout=0.5))], lr=1e-9)
        samples = with_behaviour(engine, drawn(["a"]))
        one, other = (engine.update(samples, objective())["grad_norm/a"] for _ in range(2))
        assert abs(one - other) > 1e-3 * one


def test_a_critic_reads_no_more_than_its_model_does() -> None:
    """A central view grows with the episode; positions beyond the context are none that the model has seen."""
    engine = train_engine(lora_policies("a"), [Critic("v", lora=LORA)])
    context = model_of(engine, "v").renderer.context
    assert context == 256
    tokens = tuple(7 + k % 200 for k in range(context + 1))
    columns = {"return": torch.ones(1), "value": torch.zeros(1)}
    fits = Sample("v", tokens[:-1], (context,), columns)  # the value after the last token that it reads
    assert engine.score([fits])[0].shape == (1,)
    engine.update([fits], objective())
    before = frozen_copy(engine.weights("v"))
    beyond = Sample("v", tokens, (context + 1,), columns)
    for call in (lambda: engine.score([fits, beyond]), lambda: engine.update([fits, beyond], objective())):
        with pytest.raises(ContextError, match=r"'v' has 257 tokens.*longer context"):
            call()
    assert same_bits(engine.weights("v"), before)
