"""Attention of flat tokens by a plan, as one step of autograd.

Each bucket of a plan gathers its queries and keys. Left to autograd, every bucket would make a gradient of all tokens for
queries, keys and values, zero but for its own, to be added up. Here each token's gradient is written once.

Shapes: N flat tokens, B sequences of a bucket, L longest queries, M longest keys, H query heads, J key heads, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kapelle.models.fast.attention import attention, backward_products, by_products, forward_products
from kapelle.models.fast.plan import Bucket, Plan


def attend_by_plan(plan: Plan, q_NHE: Tensor, k_NJE: Tensor, v_NJE: Tensor, scale: float) -> Tensor:
    """Return attention outputs `_NHE` of flat tokens."""
    if all(by_products(q_NHE, _keys(bucket).shape[1]) for bucket in plan.buckets):
        gathered: Tensor = _Planned.apply(plan, q_NHE, k_NJE, v_NJE, scale)  # type: ignore[no-untyped-call]
        return gathered
    pieces = [
        attention(*_gathered(plan, bucket, q_NHE, k_NJE, v_NJE), bucket.mask_BLM, scale).flatten(0, 1)
        for bucket in plan.buckets
    ]
    return _in_order(plan, pieces[0] if len(pieces) == 1 else torch.cat(pieces))


class _Planned(torch.autograd.Function):
    """Attention by products, all buckets at once."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, q_NHE: Tensor, k_NJE: Tensor, v_NJE: Tensor, scale: float) -> Tensor:
        out_NHE = q_NHE.new_empty(_places(plan), *q_NHE.shape[1:])
        kept: list[list[Tensor]] = []
        for bucket, out_BLHE in zip(plan.buckets, _by_bucket(plan, out_NHE), strict=True):
            gathered = _gathered(plan, bucket, q_NHE, k_NJE, v_NJE)
            kept.append(forward_products(*gathered, bucket.mask_BLM, scale, out_BLHE))
        ctx.plan, ctx.scale, ctx.counts = plan, scale, [len(each) for each in kept]
        ctx.save_for_backward(*(tensor for each in kept for tensor in each))
        return _in_order(plan, out_NHE)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        dout_NHE = given[0]
        if plan.where_N is not None:  # the output of a padded query went nowhere
            by_bucket = dout_NHE.new_zeros(_places(plan), *dout_NHE.shape[1:])
            dout_NHE = by_bucket.index_copy_(0, plan.where_N, dout_NHE)
        dq_NHE = torch.empty_like(dout_NHE)
        kept = iter(ctx.saved_tensors)
        dk: list[Tensor] = []
        dv: list[Tensor] = []
        views = zip(ctx.counts, _by_bucket(plan, dout_NHE), _by_bucket(plan, dq_NHE), strict=True)
        for count, dout_BLHE, dq_BLHE in views:
            saved = [next(kept) for _ in range(count)]
            dk_BJME, dv_BJME = backward_products(saved, dout_BLHE, ctx.scale, dq_BLHE)
            dk.append(dk_BJME.transpose(1, 2))
            dv.append(dv_BJME.transpose(1, 2))
        return None, _in_order(plan, dq_NHE), _summed(plan, dk), _summed(plan, dv), None


def _keys(bucket: Bucket) -> Tensor:
    return bucket.query_BL if bucket.key_BM is None else bucket.key_BM


def _places(plan: Plan) -> int:
    """Return how many queries all buckets have, padding included."""
    return sum(bucket.query_BL.numel() for bucket in plan.buckets)


def _by_bucket(plan: Plan, x_NHE: Tensor) -> list[Tensor]:
    """Return views `_BLHE` of what lies bucket after bucket."""
    parts = x_NHE.split([bucket.query_BL.numel() for bucket in plan.buckets])
    return [
        part.unflatten(0, bucket.query_BL.shape) for part, bucket in zip(parts, plan.buckets, strict=True)
    ]


def _gathered(plan: Plan, bucket: Bucket, q_NHE: Tensor, *kv_NJE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a bucket's queries, keys and values."""
    keys_BM = _keys(bucket)
    places = (bucket.query_BL, keys_BM, keys_BM)
    q, k, v = (
        (x if plan.where_N is None else x.index_select(0, place.flatten())).unflatten(0, place.shape)
        for x, place in zip((q_NHE, *kv_NJE), places, strict=True)
    )
    return q, k, v


def _in_order(plan: Plan, x_NHE: Tensor) -> Tensor:
    """From bucket after bucket, padding included, to the order of the flat tokens."""
    return x_NHE if plan.where_N is None else x_NHE.index_select(0, plan.where_N)


def _summed(plan: Plan, parts: list[Tensor]) -> Tensor:
    """Return the gradient `_NJE` of keys or values from those of all buckets, `_BMJE`: a prefix has one from each branch."""
    own = [
        part[:, -bucket.query_BL.shape[1] :].flatten(0, 1)
        for bucket, part in zip(plan.buckets, parts, strict=True)
    ]
    sum_NJE = _in_order(plan, own[0] if len(own) == 1 else torch.cat(own))
    for bucket, part in zip(plan.buckets, parts, strict=True):
        if bucket.key_BM is not None:
            length = bucket.key_BM.shape[1] - bucket.query_BL.shape[1]
            sum_NJE.index_add_(0, bucket.key_BM[:, :length].flatten(), part[:, :length].flatten(0, 1))
    return sum_NJE
