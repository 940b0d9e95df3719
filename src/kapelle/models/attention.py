"""Attention of sequences of one length, by the way that is fastest where it runs.

On a CPU, torch's fused attention is made for long sequences in float32: its backward pass in half precision takes
three to ten times as long as the products that it stands for, and short sequences cost more than they compute.
So half precision and short sequences are written as batched products here, with a backward pass of our own.

Shapes: B sequences, L queries, M keys, H query heads, J key heads, G = H / J query heads per key head, E head
size, P = B·J pairs of sequence and key head, S = G·L queries of a pair.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SHORT = 64
"""Most keys for which products beat fused attention in float32."""
HALF = 512
"""The same in half precision: more would be faster still, but weights of all pairs are kept for backward."""


def attention(
    q_BLHE: Tensor, k_BMJE: Tensor, v_BMJE: Tensor, mask_BLM: Tensor | None, scale: float
) -> Tensor:
    """Return what each query gathered, `_BLHE`; `mask_BLM` is True where it may look, None is plain causal."""
    most = SHORT if q_BLHE.dtype == torch.float32 else HALF
    if q_BLHE.device.type == "cpu" and k_BMJE.shape[1] <= most:
        gathered: Tensor = _Products.apply(q_BLHE, k_BMJE, v_BMJE, mask_BLM, scale)  # type: ignore[no-untyped-call]
        return gathered
    mask = None if mask_BLM is None else mask_BLM[:, None]
    fused_BHLE: Tensor = scaled_dot_product_attention(
        q_BLHE.transpose(1, 2),
        k_BMJE.transpose(1, 2),
        v_BMJE.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q_BLHE.shape[2] != k_BMJE.shape[2],
    )
    return fused_BHLE.transpose(1, 2)


class _Products(torch.autograd.Function):
    """softmax(q·kᵀ)·v; query heads that share a key head lie one below the other in one product."""

    @staticmethod
    def forward(
        ctx: Any, q_BLHE: Tensor, k_BMJE: Tensor, v_BMJE: Tensor, mask_BLM: Tensor | None, scale: float
    ) -> Tensor:
        heads = k_BMJE.shape[2]
        q_PSE = _paired(q_BLHE, heads).mul_(scale)
        k_PME, v_PME = _paired(k_BMJE, heads), _paired(v_BMJE, heads)
        weight_PSM = torch.bmm(q_PSE, k_PME.transpose(1, 2))
        length, keys = q_BLHE.shape[1], k_BMJE.shape[1]
        hidden = _future(length, q_BLHE) if mask_BLM is None else _hidden(mask_BLM, q_BLHE)
        weight_PSM.view(len(q_BLHE), -1, length, keys).add_(hidden)
        torch.softmax(weight_PSM, -1, out=weight_PSM)
        ctx.save_for_backward(q_PSE, k_PME, v_PME, weight_PSM)
        ctx.scale, ctx.heads = scale, heads
        return _unpaired(torch.bmm(weight_PSM, v_PME), len(q_BLHE), heads, length)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_PSE, k_PME, v_PME, weight_PSM = ctx.saved_tensors
        size, length, keys = given[0].shape[0], given[0].shape[1], k_PME.shape[1]
        given_PSE = _paired(given[0], ctx.heads)
        dv_PME = torch.bmm(weight_PSM.transpose(1, 2), given_PSE)
        dweight_PSM = torch.bmm(given_PSE, v_PME.transpose(1, 2))
        dscore_PSM = torch._softmax_backward_data(dweight_PSM, weight_PSM, -1, weight_PSM.dtype)  # noqa: SLF001 — the one public name of this kernel is autograd
        dq_PSE = torch.bmm(dscore_PSM, k_PME).mul_(ctx.scale)
        dk_PME = torch.bmm(dscore_PSM.transpose(1, 2), q_PSE)
        return (
            _unpaired(dq_PSE, size, ctx.heads, length),
            _unpaired(dk_PME, size, ctx.heads, keys),
            _unpaired(dv_PME, size, ctx.heads, keys),
            None,
            None,
        )


def _paired(x_BLHE: Tensor, heads: int) -> Tensor:
    """Return a fresh `_PSE`: sequences × key heads, and below each other the queries of its query heads."""
    size, length, all_heads, width = x_BLHE.shape
    paired = torch.empty(size, all_heads, length, width, dtype=x_BLHE.dtype, device=x_BLHE.device)
    paired.copy_(x_BLHE.transpose(1, 2))
    return paired.view(size * heads, -1, width)


def _unpaired(x_PSE: Tensor, size: int, heads: int, length: int) -> Tensor:
    return x_PSE.view(size, heads * (x_PSE.shape[1] // length), length, -1).transpose(1, 2)


def _future(length: int, like: Tensor) -> Tensor:
    """Return −∞ for keys after the query."""
    bare = torch.full((length, length), float("-inf"), dtype=like.dtype, device=like.device)
    return bare.triu_(1)


def _hidden(mask_BLM: Tensor, like: Tensor) -> Tensor:
    """Return −∞ where a mask is False, for all heads."""
    bare = torch.zeros(mask_BLM.shape, dtype=like.dtype, device=like.device)
    return bare.masked_fill_(~mask_BLM, float("-inf"))[:, None]
