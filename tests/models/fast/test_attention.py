"""Attention by products: the numbers of torch's own attention, and gradients that finite differences confirm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kapelle.models.fast import attention as module
from kapelle.models.fast.attention import PRODUCT_KEYS, QUERY_STEP, attention


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def inputs(length: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return (
        drawn(3, length, 4, 8, dtype=dtype),
        drawn(3, keys, 2, 8, dtype=dtype, seed=1),
        drawn(3, keys, 2, 8, dtype=dtype, seed=2),
    )


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """By torch, in double precision, each key head repeated for its two query heads."""
    rows = (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))
    query, key, value = (x.detach().double().transpose(1, 2) for x in rows)
    seen = None if mask is None else mask[:, None]
    gathered = scaled_dot_product_attention(query, key, value, seen, is_causal=mask is None, scale=scale)
    return gathered.transpose(1, 2)


def branch_mask(length: int, prefix: int) -> Tensor:
    """Three branches whose prefixes have different lengths, then what is causal."""
    real = torch.arange(prefix) < torch.tensor([[prefix], [prefix - 1], [1]])
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return torch.cat((real[:, None].expand(-1, length, -1), causal.expand(3, -1, -1)), 2)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 3e-6), (torch.float64, 1e-14), (torch.bfloat16, 0.03)]
)
def test_it_gathers_as_torch_does(dtype: torch.dtype, bound: float) -> None:
    for length, prefix in ((1, 1), (5, 3), (QUERY_STEP, 0), (2 * QUERY_STEP + 1, 2), (PRODUCT_KEYS + 1, 0)):
        mask = branch_mask(length, prefix) if prefix else None
        q, k, v = inputs(length, length + prefix, dtype)
        gathered = attention(q, k, v, mask, 0.3)
        assert gathered.shape == q.shape
        assert float((gathered.detach() - reference(q, k, v, mask, 0.3)).abs().max()) < bound


@pytest.mark.sample(6)
@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3, 4])
@pytest.mark.parametrize("prefix", [0, 3])
def test_its_gradients_are_those_of_finite_differences(
    prefix: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUERY_STEP", step)
    mask = branch_mask(4, prefix) if prefix else None
    q, k, v = inputs(4, 4 + prefix, torch.float64)
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, mask, 0.3), (q, k, v))
