"""Attention by a plan: numbers and gradients of one dense product over all flat tokens, under the mask that the plan means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kapelle.models.fast import attention as module
from kapelle.models.fast.attention import Span, attend_by_plan, plan_spans

PLANS = {
    "one length": [Span(0, 4, None), Span(4, 4, None)],
    "lengths that share no bucket": [Span(0, 9, None), Span(9, 2, None), Span(11, 5, None)],
    "lengths that share one": [Span(0, 11, None), Span(11, 12, None), Span(23, 3, None)],
    "branches of two prefixes": [
        Span(0, 3, None), Span(3, 4, (0, 3)), Span(7, 4, (0, 3)), Span(11, 1, (0, 3)),
        Span(12, 5, None), Span(17, 2, (12, 5)), Span(19, 6, None),
    ],
}  # fmt: skip


def drawn(tokens: int, heads: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, 6, generator=generator, dtype=torch.float64, requires_grad=True)


def dense(
    spans: list[Span], q_NHE: Tensor, k_NJE: Tensor, v_NJE: Tensor, window: int, cap: float | None
) -> Tensor:
    tokens = len(q_NHE)
    seen_NN = torch.zeros(tokens, tokens, dtype=torch.bool)
    for start, length, prefix in spans:
        for n in range(start, start + length):
            text = [*range(prefix[0], sum(prefix)), *range(start, n + 1)] if prefix else range(start, n + 1)
            seen_NN[n, text[-window:]] = True
    each = q_NHE.shape[1] // k_NJE.shape[1]
    k_NHE, v_NHE = (x.repeat_interleave(each, 1) for x in (k_NJE, v_NJE))
    score_HNN = torch.einsum("nhe,mhe->hnm", q_NHE, k_NHE) * 0.3
    if cap is not None:
        score_HNN = cap * (score_HNN / cap).tanh()
    weight_HNN = score_HNN.masked_fill(~seen_NN, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhe->nhe", weight_HNN, v_NHE)


@pytest.mark.parametrize(
    ("most", "window", "cap"), [(0, 99, None), (7, 99, None), (512, 99, None), (0, 3, None), (7, 3, 0.5)]
)
@pytest.mark.parametrize("name", PLANS)
def test_numbers_and_gradients_are_those_of_a_dense_product(
    name: str, most: int, window: int, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By products alone, by torch's fused attention alone, and by both."""
    monkeypatch.setattr(module, "PRODUCT_KEYS", most)
    spans = PLANS[name]
    tokens = sum(span.length for span in spans)
    inputs = drawn(tokens, 4, 0), drawn(tokens, 2, 1), drawn(tokens, 2, 2)
    given = drawn(tokens, 4, 3).detach()
    expected = dense(spans, *inputs, window, cap)
    gathered = attend_by_plan(plan_spans(spans).within(window), *inputs, 0.3, cap)
    assert float((gathered - expected).detach().abs().max()) < 1e-14
    wanted = torch.autograd.grad(expected, inputs, given)
    for one, other in zip(torch.autograd.grad(gathered, inputs, given), wanted, strict=True):
        assert float((one - other).abs().max()) < 1e-13
