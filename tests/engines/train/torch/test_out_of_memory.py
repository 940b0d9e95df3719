"""Where a pass does not fit in memory, an update is taken again in smaller ones, and is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.tiny import (
    draw_samples,
    frozen_copy,
    lora_policies,
    same_bits,
    train_engine,
    with_behaviour,
)
from torch import Tensor

from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.train.protocol import Objective, UpdateLimits
from kapelle.engines.train.torch.engine import ForwardPass, TorchTrainEngine
from kapelle.errors import EngineError
from kapelle.rows import Sample
from kapelle.team import Lora

OBJECTIVE = Objective(SurrogateConfig().build(), parity=False)
LR = 1e-2
LENGTHS = [(3, 5), (7, 2), (1, 9), (12, 4), (2, 6)]
LONGEST = 12 + 4


def ready(dropout: float = 0.0, **limits: Any) -> tuple[TorchTrainEngine, list[Sample]]:
    lora = Lora(rank=2, alpha=4.0, dropout=dropout)
    # With this `eps` a step is at most `lr` times the gradient: so little of a gradient's rounding reaches the weights.
    engine = train_engine(lora_policies("a", "b", lora=lora), limits=UpdateLimits(**limits), lr=LR, eps=1.0)
    return engine, with_behaviour(engine, draw_samples(["a", "b"], LENGTHS))


def gone() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Give forward passes that learn memory for so many tokens; returns the tokens of those that were tried."""

    def of(tokens: int) -> list[int]:
        tried: list[int] = []
        right = ForwardPass.outputs

        def outputs(self: ForwardPass, batch: Any, *rest: Any) -> Any:
            if torch.is_grad_enabled():
                tried.append(len(batch.tokens_N))
                if tried[-1] > tokens:
                    gone()
            return right(self, batch, *rest)

        monkeypatch.setattr(ForwardPass, "outputs", outputs)
        return tried

    return of


@pytest.mark.sample(3)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_update_with_a_failed_pass_equals_one_that_fits(
    failing: int, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, samples = ready(dropout, microbatch_tokens=40)
    other, _ = ready(dropout, microbatch_tokens=40)
    expected = other.update(samples, OBJECTIVE)
    small, _ = ready(dropout, microbatch_tokens=38 // 2)  # half of the largest pass of at most 40 tokens
    same = small.update(samples, OBJECTIVE)
    taken, right = 0, torch.autograd.backward

    def backward(losses: list[Tensor]) -> None:
        nonlocal taken
        taken += 1
        right(losses)
        if taken == failing:  # its gradients have been added
            gone()

    monkeypatch.setattr(torch.autograd, "backward", backward)
    metrics = engine.update(samples, OBJECTIVE)
    assert taken > failing
    assert metrics == same
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
    # Each side rounds a weight once, and a gradient below 1 once for each of the tokens that it sums.
    eps = torch.finfo(torch.float32).eps
    tokens = sum(prompt + answer for prompt, answer in LENGTHS)
    for name in ("a", "b"):
        moved = frozen_copy(engine.weights(name))
        assert same_bits(moved, frozen_copy(small.weights(name)))
        for key, tensor in frozen_copy(other.weights(name)).items():
            assert torch.allclose(moved[key], tensor, rtol=eps, atol=LR * tokens * eps)


def test_a_sequence_that_does_not_fit_alone_ends_it(memory: Callable[[int], list[int]]) -> None:
    engine, samples = ready()
    before = frozen_copy(engine.weights("a"))
    memory(LONGEST - 2)  # its last token is only a target
    with pytest.raises(
        EngineError, match=rf"pass of {LONGEST - 1} tokens .* one sequence.*gradient_checkpointing"
    ):
        engine.update(samples, OBJECTIVE)
    assert all(p.grad is None for learner in engine.learners.values() for p in learner.parameters.values())
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.weights("a").items())


def test_scores_are_taken_in_smaller_passes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, samples = ready(microbatch_tokens=4096)
    expected = engine.score(samples)
    right = ForwardPass.outputs

    def outputs(self: ForwardPass, batch: Any, *rest: Any) -> Any:
        if len(batch.tokens_N) > 30:
            gone()
        return right(self, batch, *rest)

    monkeypatch.setattr(ForwardPass, "outputs", outputs)
    for one, other in zip(engine.score(samples), expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
