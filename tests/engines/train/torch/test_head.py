"""Log-probs in chunks: the numbers of one piece, while no more logits are alive than the budget allows."""

from __future__ import annotations

import pytest
import torch
from tests.engines.train.torch.test_engine import drawn
from tests.support.tiny import tiny_model
from torch import Tensor

from kapelle.engines.train.batch import pack
from kapelle.engines.train.torch import head
from kapelle.functional.divergences import TokenStatistics


def said(entropy: head.Entropy) -> tuple[TokenStatistics, Tensor]:
    """What a tiny model says of drawn samples, and the hidden states that it was asked from."""
    (batch,) = pack(drawn(["a"], temperature=0.7), 100_000)
    model = tiny_model()
    generator = torch.Generator().manual_seed(0)
    hidden_KD = torch.randn(len(batch.source_K), model.hidden_size, generator=generator, requires_grad=True)
    return head.token_statistics(model, hidden_KD, batch, batch.parts["a"], entropy), hidden_KD


def largest_kept(monkeypatch: pytest.MonkeyPatch, budget: int) -> int:
    """Return the size of the largest tensor that is kept for the backward pass."""
    monkeypatch.setattr(head, "LOGIT_BUDGET", budget)
    sizes: list[int] = []

    def kept(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
        said(head.Entropy.LEARNED)
    return max(sizes)


@pytest.mark.parametrize("entropy", list(head.Entropy))
def test_chunks_give_the_numbers_and_gradients_of_one_piece(
    entropy: head.Entropy, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for budget in (1 << 24, 262 * 7, 1):  # all at once, seven tokens, one token
        monkeypatch.setattr(head, "LOGIT_BUDGET", budget)
        statistics, hidden_KD = said(entropy)
        (statistics.logp_K.exp().sum() + (statistics.entropy_K * 0.1).sum()).backward()
        assert hidden_KD.grad is not None
        found.append((statistics.logp_K.detach(), statistics.entropy_K.detach(), hidden_KD.grad))
    for chunked in found[1:]:
        for one, other in zip(chunked, found[0], strict=True):
            assert float((one - other).abs().max()) < 4e-6  # four float32 steps at −10
    assert bool(found[0][1].any()) == (entropy is not head.Entropy.LEFT_OUT)


def test_a_measured_entropy_is_the_learned_one_without_its_gradient() -> None:
    learned, _ = said(head.Entropy.LEARNED)
    measured, hidden_KD = said(head.Entropy.MEASURED)
    assert not measured.entropy_K.requires_grad
    torch.testing.assert_close(measured.entropy_K, learned.entropy_K.detach(), atol=1e-5, rtol=0)
    left_out, other_KD = said(head.Entropy.LEFT_OUT)
    for statistics in (measured, left_out):
        statistics.logp_K.sum().backward()
    assert hidden_KD.grad is not None
    assert other_KD.grad is not None
    assert torch.equal(hidden_KD.grad, other_KD.grad)


def test_logits_are_not_kept_for_the_backward_pass_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    # The largest that is left is the head's own weight.
    weight = tiny_model().model.get_input_embeddings().weight.numel()
    assert largest_kept(monkeypatch, 1 << 24) > 3 * weight
    assert largest_kept(monkeypatch, 262 * 4) <= weight
