"""Attention of sequences of one length, by the fastest way on each device.

On a CPU, torch's fused attention is made for long sequences: in half precision its backward pass takes three to ten
times as long as the products that it replaces, and up to a few hundred keys its blocks are too coarse to skip masked
keys. So up to `MOST` keys attention is written as batched products here, a few queries at a time against
the keys that they can see, with a backward pass of our own. Longer sequences, and other devices, take the fused one.

Shapes: B sequences, L queries, M keys, H query heads, J key heads, G = H / J query heads per key head, E head
size, P = B·J pairs of sequence and key head, S = G·L queries of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MOST = 512
"""Most keys for products: the weights of all pairs are kept for the backward pass."""
STEP = 32
"""Queries of one product: it reads no key that comes after the last of them."""


def attention(
    q_BLHE: Tensor, k_BMJE: Tensor, v_BMJE: Tensor, mask_BLM: Tensor | None, scale: float
) -> Tensor:
    """Return attention outputs `_BLHE`; `mask_BLM` is True where a query may attend, None is plain causal.

    The last keys are the queries' own: with or without a mask, no query attends to a key after its own.
    """
    if by_products(q_BLHE, k_BMJE.shape[1]):
        gathered: Tensor = _Products.apply(q_BLHE, k_BMJE, v_BMJE, mask_BLM, scale)  # type: ignore[no-untyped-call]
        return gathered
    mask_B1LM = None if mask_BLM is None else mask_BLM[:, None]
    q_BHLE, k_BJME, v_BJME = (x.transpose(1, 2) for x in (q_BLHE, k_BMJE, v_BMJE))
    return fused_attention(q_BHLE, k_BJME, v_BJME, mask_B1LM, causal=mask_BLM is None, scale=scale).transpose(
        1, 2
    )


def by_products(q: Tensor, keys: int) -> bool:
    """Return whether products are the faster way for queries to so many keys."""
    return q.device.type == "cpu" and keys <= MOST


def fused_attention(
    q_BHLE: Tensor,
    k_BJME: Tensor,
    v_BJME: Tensor,
    mask_B1LM: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    """Return the outputs `_BHLE` of torch's fused attention, by a kernel that does not keep all weights."""
    each = q_BHLE.shape[1] // k_BJME.shape[1]
    if each > 1 and repeats_keys(q_BHLE.device, q_BHLE.dtype, masked=mask_B1LM is not None):
        k_BJME, v_BJME, each = k_BJME.repeat_interleave(each, 1), v_BJME.repeat_interleave(each, 1), 1
    fused_BHLE: Tensor = scaled_dot_product_attention(
        q_BHLE, k_BJME, v_BJME, mask_B1LM, is_causal=causal, scale=scale, enable_gqa=each > 1
    )
    return fused_BHLE


def repeats_keys(device: torch.device, dtype: torch.dtype, *, masked: bool) -> bool:
    """Return whether key heads are repeated for their query heads before fused attention.

    On CUDA only the flash kernel lets query heads share a key head, and it takes half precision and no mask. For
    anything else torch would fall back to products that keep the weights of all pairs of tokens.
    """
    return device.type == "cuda" and (masked or dtype not in (torch.float16, torch.bfloat16))


class _Products(torch.autograd.Function):
    """softmax(q·kᵀ)·v of one set of sequences."""

    @staticmethod
    def forward(
        ctx: Any, q_BLHE: Tensor, k_BMJE: Tensor, v_BMJE: Tensor, mask_BLM: Tensor | None, scale: float
    ) -> Tensor:
        out_BLHE = torch.empty_like(q_BLHE, memory_format=torch.contiguous_format)
        ctx.save_for_backward(*forward_products(q_BLHE, k_BMJE, v_BMJE, mask_BLM, scale, out_BLHE))
        ctx.scale = scale
        return out_BLHE

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        dq_BLHE = torch.empty_like(given[0], memory_format=torch.contiguous_format)
        dk_BJME, dv_BJME = backward_products(ctx.saved_tensors, given[0], ctx.scale, dq_BLHE)
        return dq_BLHE, dk_BJME.transpose(1, 2), dv_BJME.transpose(1, 2), None, None


def forward_products(
    q_BLHE: Tensor, k_BMJE: Tensor, v_BMJE: Tensor, mask_BLM: Tensor | None, scale: float, out_BLHE: Tensor
) -> list[Tensor]:
    """Fill `out_BLHE` with softmax(q·kᵀ)·v; return what the backward pass needs.

    Query heads that share a key head lie one below the other in one product.
    """
    heads, keys, length = k_BMJE.shape[2], k_BMJE.shape[1], q_BLHE.shape[1]
    k_PME, v_PME = _paired(k_BMJE, heads), _paired(v_BMJE, heads)
    hidden_BLM = _future(length, q_BLHE) if mask_BLM is None else _hidden(mask_BLM, q_BLHE)
    kept: list[Tensor] = [k_PME, v_PME]
    for first in range(0, length, STEP):
        rows, seen = slice(first, first + STEP), keys - max(0, length - first - STEP)
        q_PSE = _paired(q_BLHE[:, rows], heads).mul_(scale)
        weight_PSM = torch.bmm(q_PSE, k_PME[:, :seen].transpose(1, 2))
        scores = weight_PSM.view(len(q_BLHE), q_BLHE.shape[2], -1, seen)
        scores.add_(hidden_BLM[:, None, rows, :seen])
        torch.softmax(weight_PSM, -1, out=weight_PSM)
        _unpair(torch.bmm(weight_PSM, v_PME[:, :seen]), out_BLHE[:, rows])
        kept += (q_PSE, weight_PSM)
    return kept


def backward_products(
    kept: Sequence[Tensor], dout_BLHE: Tensor, scale: float, dq_BLHE: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill `dq_BLHE` from what `forward_products` kept; return the gradients `_BJME` of keys and values."""
    k_PME, v_PME, *steps = kept
    keys, heads = k_PME.shape[1], len(k_PME) // len(dout_BLHE)
    dk_PME, dv_PME = torch.empty_like(k_PME), torch.empty_like(v_PME)
    # From the last queries, which attend to all keys, so that the first product fills every gradient.
    for number in reversed(range(len(steps) // 2)):
        q_PSE, weight_PSM = steps[2 * number : 2 * number + 2]
        rows, seen = slice(number * STEP, (number + 1) * STEP), weight_PSM.shape[2]
        beta = 0 if seen == keys else 1
        dout_PSE = _paired(dout_BLHE[:, rows], heads)
        dv_PME[:, :seen].baddbmm_(weight_PSM.transpose(1, 2), dout_PSE, beta=beta)
        dweight_PSM = torch.bmm(dout_PSE, v_PME[:, :seen].transpose(1, 2))
        dscore_PSM = torch._softmax_backward_data(dweight_PSM, weight_PSM, -1, weight_PSM.dtype)  # noqa: SLF001 — the one public name of this kernel is autograd
        dk_PME[:, :seen].baddbmm_(dscore_PSM.transpose(1, 2), q_PSE, beta=beta)
        _unpair(torch.bmm(dscore_PSM, k_PME[:, :seen]).mul_(scale), dq_BLHE[:, rows])
    size = len(dq_BLHE)
    return dk_PME.view(size, heads, keys, -1), dv_PME.view(size, heads, keys, -1)


def _paired(x_BLHE: Tensor, heads: int) -> Tensor:
    """Return a fresh `_PSE`: sequences × key heads, and below each other the queries of its query heads."""
    size, length, all_heads, width = x_BLHE.shape
    paired = torch.empty(size, all_heads, length, width, dtype=x_BLHE.dtype, device=x_BLHE.device)
    paired.copy_(x_BLHE.transpose(1, 2))
    return paired.view(size * heads, -1, width)


def _unpair(x_PSE: Tensor, into_BLHE: Tensor) -> None:
    size, length, heads, width = into_BLHE.shape
    into_BLHE.transpose(1, 2).copy_(x_PSE.view(size, heads, length, width))


def _future(length: int, like: Tensor) -> Tensor:
    """Return −∞ for keys after the query, `_1LL`."""
    bare = torch.full((length, length), float("-inf"), dtype=like.dtype, device=like.device)
    return bare.triu_(1)[None]


def _hidden(mask_BLM: Tensor, like: Tensor) -> Tensor:
    """Return −∞ where a mask is False, `_BLM`."""
    bare = torch.zeros(mask_BLM.shape, dtype=like.dtype, device=like.device)
    return bare.masked_fill_(~mask_BLM, float("-inf"))
