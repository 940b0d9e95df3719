"""Which way the head goes: the numbers are the same, and beyond the budget no logits are kept."""

from __future__ import annotations

import pytest
import torch
from tests.engines.train.torch.test_engine import ROUNDING, apart, drawn, objective, plain_gradient
from tests.support.tiny import (
    first_gradient,
    lora_policies,
    model_of,
    tiny_model,
    train_engine,
    with_behaviour,
)
from torch import Tensor

from kapelle.engines.train.batch import pack
from kapelle.engines.train.torch import large_head
from kapelle.functional.divergences import TokenStatistics
from kapelle.team import Policy
from kapelle.training.trainer import Trainer


def said(entropy: large_head.Entropy) -> tuple[TokenStatistics, Tensor]:
    """What a tiny model says of drawn samples, and the hidden states that it was asked from."""
    (batch,) = pack(drawn(["a"], temperature=0.7), 100_000)
    model = tiny_model()
    generator = torch.Generator().manual_seed(0)
    hidden_KD = torch.randn(len(batch.source_K), model.hidden_size, generator=generator, requires_grad=True)
    return large_head.token_statistics(model, hidden_KD, batch, batch.parts["a"].place, entropy), hidden_KD


@pytest.mark.parametrize("budget", [1 << 24, 1])
def test_a_measured_entropy_is_the_learned_one_without_its_gradient(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_head, "LOGIT_BUDGET", budget)
    learned, _ = said(large_head.Entropy.LEARNED)
    measured, hidden_KD = said(large_head.Entropy.MEASURED)
    assert not measured.entropy_K.requires_grad
    torch.testing.assert_close(measured.entropy_K, learned.entropy_K.detach(), atol=1e-5, rtol=0)
    left_out, other_KD = said(large_head.Entropy.LEFT_OUT)
    for statistics in (measured, left_out):
        statistics.logp_K.sum().backward()
    assert hidden_KD.grad is not None
    assert other_KD.grad is not None
    assert torch.equal(hidden_KD.grad, other_KD.grad)


@pytest.mark.parametrize("policies", [lora_policies("a"), [Policy("a")]], ids=["frozen head", "tied head"])
def test_an_update_in_pieces_is_that_of_each_sequence_alone(
    policies: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_head, "LOGIT_BUDGET", 0)
    monkeypatch.setattr(large_head, "PIECE", 3000)
    engine = train_engine(policies, max_grad_norm=None)
    model = model_of(engine, "a")
    samples = drawn(["a"], temperature=0.6)
    parameters = model.bank.parameters("a") if policies[0].lora else model.base_parameters()
    adapter = "a" if policies[0].lora else None
    expected = plain_gradient(model, samples, adapter, parameters)
    engine.update(with_behaviour(engine, samples), objective())
    assert apart(first_gradient(engine, "a"), expected) < ROUNDING


@pytest.mark.parametrize("budget", [1, 1 << 24])
def test_a_head_in_float32_brings_the_log_probs_of_sampler_and_trainer_together(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_head, "LOGIT_BUDGET", budget)
    found = []
    for head in ("null", "float32"):
        settings = ("warmup.steps=40", "training.steps=1", "model.dtype=bfloat16", f"model.head_dtype={head}")
        with Trainer.from_recipe("demo", *settings, "evaluation.before_and_after=false") as trainer:
            [step] = trainer.steps()
        found.append(step.metrics["parity/mean"])
    assert found[1] < found[0] / 4
