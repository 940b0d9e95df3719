"""Attention of flat tokens by a plan, which defines which tokens attend to which, with the fastest method on each device.

Flat tokens are gathered into buckets of sequences of similar length. With plain autograd, every bucket would create
gradients of queries, keys and values for all tokens, which are mostly zeros, and add them up. In this module, the
gradient of each token is written once.

On a CPU, torch's fused attention is designed for long sequences: in half precision, its backward pass takes three to
ten times as long as the products that it replaces, and up to a few hundred keys, its blocks are too coarse to skip
masked keys. Attention to at most `PRODUCT_KEYS` keys is therefore computed by batched products, a few queries at a time
with their visible keys, and with a hand-written backward pass. Longer sequences and other devices use the fused kernel.

On CUDA in half precision, one kernel computes all sequences of a pass without buckets, masks or repeated key heads.

In tensor shapes, N is the number of flat tokens, B of sequences in a bucket, L of queries (of the longest sequence), M
of keys (of the longest sequence), H of query heads, J of key heads, and G = H / J of query heads per key head. E is the
head size, P = B·J the number of pairs of a sequence and a key head, and S = G·L the number of queries of a pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from inspect import signature
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kapelle.models.fast import kernels

WASTE = 0.1
"""The maximum fraction of padding in a bucket."""

PRODUCT_KEYS = 512
"""The maximum number of keys for attention by products, which store the attention weights of all pairs for the backward
pass."""
QUERY_STEP = 32
"""The number of queries per product. A product reads no key after the last of its queries."""


class Bucket(NamedTuple):
    """A group of B sequences of similar length whose attention is computed together."""

    query_BL: Tensor
    """The flat position of each query token. Padding at the end repeats a position."""
    key_BM: Tensor | None
    """The flat position of each key token, or None if the keys belong to the query tokens and attention is plain
    causal."""
    mask_BLM: Tensor | None
    """A mask that is True where a query may attend to a key, or None if `key_BM` is None."""


class Span(NamedTuple):
    """A range of flat tokens that attend causally to each other and to all tokens of a prefix."""

    start: int
    length: int
    prefix: tuple[int, int] | None
    """The start and the length of the prefix, or None if there is no prefix."""


class Runs(NamedTuple):
    """S consecutive spans in the form that kernels for sequences of any length require."""

    query_ends_S: Tensor
    """The row after the last query of each span as int32, preceded by 0, which gives S + 1 numbers."""
    key_ends_S: Tensor
    """The row after the last key of each span as int32, preceded by 0, which gives S + 1 numbers."""
    most_queries: int
    """The maximum number of queries in one span."""
    most_keys: int
    key_M: Tensor | None
    """The flat position of each key, with the prefix of a span before the span's own tokens, or None if the keys belong
    to the query tokens."""


class AttentionPlan:
    """A plan of which tokens attend to which, in the form that each kernel requires. Each form is created on first use."""

    def __init__(
        self,
        spans: Sequence[Span],
        device: torch.device | str = "cpu",
        *,
        idle_buckets: int = 0,
        window: int | None = None,
    ) -> None:
        """Create a plan for spans that cover the flat tokens in order. The tensors of the plan are created on this device.

        With a `window`, a token attends to this many tokens, of which the last is the token itself. The `idle_buckets`
        additional buckets recompute the first token, and their outputs are ignored. With idle buckets, processes that
        must take every step of a pass together have the same number of buckets.
        """
        self.spans = tuple(spans)
        self._device = device
        self._idle_buckets = idle_buckets
        self.window = window
        self._within: dict[int, AttentionPlan] = {}

    def within(self, window: int | None) -> AttentionPlan:
        """Return the plan for layers with this sliding window."""
        longest = max(span.length + (span.prefix[1] if span.prefix else 0) for span in self.spans)
        if window is None or window >= longest:
            return self
        if window not in self._within:
            self._within[window] = AttentionPlan(
                self.spans, self._device, idle_buckets=self._idle_buckets, window=window
            )
        return self._within[window]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The spans, grouped by length."""
        return self._bucketed[0]

    @property
    def where_N(self) -> Tensor | None:  # noqa: N802 — the suffix is its shape
        """The position of each flat token in the concatenated queries of the buckets, or None if the order is the same."""
        return self._bucketed[1]

    @cached_property
    def _bucketed(self) -> tuple[tuple[Bucket, ...], Tensor | None]:
        with torch.inference_mode(mode=False):  # a pass without gradients may be the first to use a plan
            buckets, where_N = _in_buckets(self.spans, self._device, self.window)
            if not self._idle_buckets:
                return buckets, where_N
            idle = Bucket(torch.zeros(1, 1, dtype=torch.long, device=self._device), None, None)
            if where_N is None:
                where_N = torch.arange(sum(span.length for span in self.spans), device=self._device)
            return buckets + (idle,) * self._idle_buckets, where_N

    @cached_property
    def runs(self) -> Runs:
        """The spans in sequence, without buckets."""
        queries = [span.length for span in self.spans]
        keys = [span.length + (span.prefix[1] if span.prefix else 0) for span in self.spans]
        with torch.inference_mode(mode=False):
            if len(set(queries)) == 1 and keys == queries:  # needs no copy to the device
                ends_S = torch.arange(len(queries) + 1, dtype=torch.int32, device=self._device) * queries[0]
                return Runs(ends_S, ends_S, queries[0], queries[0], None)
            ends = torch.tensor([[0, *accumulate(queries)], [0, *accumulate(keys)]], dtype=torch.int32)
            query_ends_S, key_ends_S = ends.to(self._device)
            key_M = None
            if keys != queries:
                runs = [
                    run for start, length, prefix in self.spans for run in (prefix, (start, length)) if run
                ]
                key_M = torch.cat([torch.arange(start, start + length) for start, length in runs])
                key_M = key_M.to(self._device)
            return Runs(query_ends_S, key_ends_S, max(queries), max(keys), key_M)


def plan_sequences(lengths: Sequence[int], device: torch.device | str = "cpu") -> AttentionPlan:
    """Return a plan for consecutive sequences, each of which attends causally to itself."""
    spans: list[Span] = []
    for length in lengths:
        spans.append(Span(spans[-1].start + spans[-1].length if spans else 0, length, None))
    return plan_spans(spans, device)


def plan_spans(spans: Sequence[Span], device: torch.device | str = "cpu") -> AttentionPlan:
    """Return the plan of spans that cover the flat tokens in order."""
    return AttentionPlan(spans, device)


def _in_buckets(
    spans: Sequence[Span], device: torch.device | str, window: int | None
) -> tuple[tuple[Bucket, ...], Tensor | None]:
    """Return buckets of spans, and the position of each flat token in the buckets or None if the order is the same."""

    def plain(query_BL: Tensor) -> Bucket:
        if window is None:
            return Bucket(query_BL, None, None)
        causal_LL = torch.ones(query_BL.shape[1], query_BL.shape[1], dtype=torch.bool, device=device).tril()
        return Bucket(query_BL, query_BL, causal_LL.triu(1 - window)[None])

    lengths = {span.length for span in spans}
    if len(lengths) == 1 and all(span.prefix is None for span in spans):
        places = torch.arange(sum(span.length for span in spans), device=device)
        return (plain(places.view(len(spans), -1)),), None
    buckets: list[Bucket] = []
    where = torch.empty(sum(span.length for span in spans), dtype=torch.long)
    offset = 0
    alone = [span for span in spans if span.prefix is None]
    branches = [span for span in spans if span.prefix is not None]
    for members in (*_similar_lengths(alone), *_similar_lengths(branches)):
        query_BL, real_BL = _places([(span.start, span.length) for span in members])
        where[query_BL[real_BL]] = offset + torch.arange(real_BL.numel()).view_as(real_BL)[real_BL]
        offset += real_BL.numel()
        if members[0].prefix is None:
            buckets.append(plain(query_BL.to(device)))
        else:
            # A branch's keys are its prefix, then its own tokens up to the query.
            prefix_BM, in_prefix_BM = _places([span.prefix for span in members if span.prefix is not None])
            length = query_BL.shape[1]
            causal_LL = torch.ones(length, length, dtype=torch.bool).tril()
            seen_BLM = in_prefix_BM[:, None].expand(-1, length, -1)
            if window is not None:
                causal_LL = causal_LL.triu(1 - window)
                ahead_BL1 = in_prefix_BM.sum(1)[:, None, None] + torch.arange(length)[:, None]
                seen_BLM = seen_BLM & (ahead_BL1 - torch.arange(in_prefix_BM.shape[1]) < window)
            sides = (seen_BLM, causal_LL.expand(len(members), -1, -1))
            key_BM, mask_BLM = torch.cat((prefix_BM, query_BL), dim=1), torch.cat(sides, dim=2)
            buckets.append(Bucket(query_BL.to(device), key_BM.to(device), mask_BLM.to(device)))
    return tuple(buckets), where.to(device)


def _places(runs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return the positions of ranges (start, length), padded with the last position, and a mask of the real positions."""
    start_B1 = torch.tensor([[start] for start, _ in runs])
    length_B1 = torch.tensor([[length] for _, length in runs])
    step_L = torch.arange(int(length_B1.max()))
    return start_B1 + torch.minimum(step_L, length_B1 - 1), step_L < length_B1


def _similar_lengths(spans: Sequence[Span]) -> list[list[Span]]:
    """Group spans by descending length into groups with at most `WASTE` padding. Within a group, spans are in flat order."""
    groups: list[list[Span]] = []
    filled = 0
    for span in sorted(spans, key=lambda span: (-span.length, span.start)):
        longest = groups[-1][0].length if groups else 0
        if groups and filled + span.length >= (1 - WASTE) * longest * (len(groups[-1]) + 1):
            groups[-1].append(span)
            filled += span.length
        else:
            groups.append([span])
            filled = span.length
    return [sorted(group, key=lambda span: span.start) for group in groups]


def attend_by_plan(
    plan: AttentionPlan,
    q_NHE: Tensor,
    k_NJE: Tensor,
    v_NJE: Tensor,
    scale: float,
    cap: float | None = None,
) -> Tensor:
    """Return the attention outputs of flat tokens, of shape (N, H, E), using a kernel for sequences of any length if available.

    With a `cap`, attention scores are cap · tanh(score / cap).
    """
    if cap is None and takes_runs(q_NHE, k_NJE.shape[1], plan.window):
        return attend_by_runs(plan.runs, q_NHE, k_NJE, v_NJE, scale, plan.window)
    return attend_by_buckets(plan, q_NHE, k_NJE, v_NJE, scale, cap)


def attend_by_buckets(
    plan: AttentionPlan,
    q_NHE: Tensor,
    k_NJE: Tensor,
    v_NJE: Tensor,
    scale: float,
    cap: float | None = None,
) -> Tensor:
    """Return the attention outputs of flat tokens, of shape (N, H, E), as one step of autograd if products are faster."""
    if all(by_products(q_NHE, _keys(bucket).shape[1], cap) for bucket in plan.buckets):
        gathered: Tensor = _PlannedAttention.apply(plan, q_NHE, k_NJE, v_NJE, scale, cap)  # type: ignore[no-untyped-call]
        return gathered
    pieces = [
        attention(*_gathered(plan, bucket, q_NHE, k_NJE, v_NJE), bucket.mask_BLM, scale, cap).flatten(0, 1)
        for bucket in plan.buckets
    ]
    return _in_order(plan, pieces[0] if len(pieces) == 1 else torch.cat(pieces))


# Sequences of any length in one kernel, on CUDA.


def takes_runs(q_NHE: Tensor, key_heads: int, window: int | None = None) -> bool:
    """Return whether torch's `varlen_attn` can be used for these queries and its results agree with plain operations.

    The kernel is flash attention (arXiv:2307.08691), which needs half precision, compute capability 8 or higher, and
    heads of at most 256 features that fill whole rows of 16 bytes. For heads with more than 192 features, only some
    GPUs support the backward pass.
    """
    device, (_, heads, size) = q_NHE.device, q_NHE.shape
    if (
        device.type != "cuda"
        or torch.version.cuda is None
        or q_NHE.dtype not in (torch.float16, torch.bfloat16)
        or size % 8
        or size > 256
    ):
        return False
    capability = kernels.capability(device)
    if capability < (8, 0) or (size > 192 and capability not in {(8, 0), (9, 0), (10, 0)}):
        return False
    window = None if window is None else min(window, 64)
    where = (device, q_NHE.dtype, f"{heads} heads of {size} on {key_heads}", f"window {window}")

    def trial() -> Iterator[tuple[Tensor, Tensor]]:
        """Yield outputs and gradients of two sequences, the first with two branches, computed by the kernel and by buckets."""
        spans = (Span(0, 150, None), Span(150, 7, (0, 150)), Span(157, 203, (0, 150)), Span(360, 41, None))
        plan = plan_spans(spans, device).within(window)
        given_NHE, *inputs = (
            kernels.drawn(401, many, size, seed=seed, device=device, dtype=q_NHE.dtype)
            for seed, many in enumerate((heads, heads, key_heads, key_heads))
        )
        q, k, v = (each.requires_grad_(True) for each in inputs)
        both = (
            attend_by_runs(plan.runs, q, k, v, size**-0.5, window),
            attend_by_buckets(plan, q, k, v, size**-0.5),
        )
        yield both
        yield from zip(*(torch.autograd.grad(out, (q, k, v), given_NHE) for out in both), strict=True)

    return kernels.holds("torch's attention for sequences of any length", where, trial)


def attend_by_runs(
    runs: Runs, q_NHE: Tensor, k_NJE: Tensor, v_NJE: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Return the attention outputs of flat tokens, of shape (N, H, E), using torch's `varlen_attn`. Query heads share key heads.

    A query attends to the keys of its span up to its own key, counted from the end. torch aligns queries and keys by
    their last tokens (`torch.nn.attention.bias`, LOWER_RIGHT), so every query attends to the whole prefix.
    """
    from torch.nn.attention.varlen import varlen_attn

    shares: dict[str, Any] = {"enable_gqa": q_NHE.shape[1] != k_NJE.shape[1]} if _has_gqa_option() else {}
    if runs.key_M is not None:
        k_NJE, v_NJE = (_Repeated.apply(x, runs.key_M) for x in (k_NJE, v_NJE))  # type: ignore[no-untyped-call]
    out_NHE = varlen_attn(
        q_NHE,
        k_NJE,
        v_NJE,
        runs.query_ends_S,
        runs.key_ends_S,
        runs.most_queries,
        runs.most_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **shares,
    )
    return cast("Tensor", out_NHE)  # it is a pair only with further options


@cache
def _has_gqa_option() -> bool:
    """Return whether `varlen_attn` has the option `enable_gqa`. Versions of torch before 2.12 infer this option."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


class _Repeated(torch.autograd.Function):
    """Selects rows at given positions, with repetitions. The gradients of one row are summed in at least float32."""

    @staticmethod
    def forward(ctx: Any, x_NJE: Tensor, place_M: Tensor) -> Tensor:
        ctx.save_for_backward(place_M)
        ctx.rows = len(x_NJE)
        return x_NJE.index_select(0, place_M)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None]:
        (place_M,) = ctx.saved_tensors
        dtype = torch.promote_types(given[0].dtype, torch.float32)
        sum_NJE = given[0].new_zeros(ctx.rows, *given[0].shape[1:], dtype=dtype)
        return sum_NJE.index_add_(0, place_M, given[0].to(dtype)).to(given[0].dtype), None


class _PlannedAttention(torch.autograd.Function):
    """Computes attention by products for all buckets in one step of autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: AttentionPlan,
        q_NHE: Tensor,
        k_NJE: Tensor,
        v_NJE: Tensor,
        scale: float,
        cap: float | None,
    ) -> Tensor:
        out_NHE = q_NHE.new_empty(_query_count(plan), *q_NHE.shape[1:])
        kept: list[list[Tensor]] = []
        for bucket, out_BLHE in zip(plan.buckets, _by_bucket(plan, out_NHE), strict=True):
            gathered = _gathered(plan, bucket, q_NHE, k_NJE, v_NJE)
            kept.append(forward_products(*gathered, bucket.mask_BLM, scale, cap, out_BLHE))
        ctx.plan, ctx.scale, ctx.cap, ctx.counts = plan, scale, cap, [len(each) for each in kept]
        ctx.save_for_backward(*(tensor for each in kept for tensor in each))
        return _in_order(plan, out_NHE)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        plan: AttentionPlan = ctx.plan
        dout_NHE = given[0]
        if plan.where_N is not None:  # outputs of padding were dropped
            by_bucket = dout_NHE.new_zeros(_query_count(plan), *dout_NHE.shape[1:])
            dout_NHE = by_bucket.index_copy_(0, plan.where_N, dout_NHE)
        dq_NHE = torch.empty_like(dout_NHE)
        kept = iter(ctx.saved_tensors)
        dk: list[Tensor] = []
        dv: list[Tensor] = []
        views = zip(ctx.counts, _by_bucket(plan, dout_NHE), _by_bucket(plan, dq_NHE), strict=True)
        for count, dout_BLHE, dq_BLHE in views:
            saved = [next(kept) for _ in range(count)]
            dk_BJME, dv_BJME = backward_products(saved, dout_BLHE, ctx.scale, ctx.cap, dq_BLHE)
            dk.append(dk_BJME.transpose(1, 2))
            dv.append(dv_BJME.transpose(1, 2))
        return None, _in_order(plan, dq_NHE), _summed(plan, dk), _summed(plan, dv), None, None


def _keys(bucket: Bucket) -> Tensor:
    return bucket.query_BL if bucket.key_BM is None else bucket.key_BM


def _query_count(plan: AttentionPlan) -> int:
    """Return the number of queries in all buckets, including padding."""
    return sum(bucket.query_BL.numel() for bucket in plan.buckets)


def _by_bucket(plan: AttentionPlan, x_NHE: Tensor) -> list[Tensor]:
    """Return views of consecutive buckets, of shape (B, L, H, E)."""
    parts = x_NHE.split([bucket.query_BL.numel() for bucket in plan.buckets])
    return [
        part.unflatten(0, bucket.query_BL.shape) for part, bucket in zip(parts, plan.buckets, strict=True)
    ]


def _gathered(
    plan: AttentionPlan, bucket: Bucket, q_NHE: Tensor, *kv_NJE: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of a bucket."""
    keys_BM = _keys(bucket)
    places = (bucket.query_BL, keys_BM, keys_BM)
    q, k, v = (
        (x if plan.where_N is None else x.index_select(0, place.flatten())).unflatten(0, place.shape)
        for x, place in zip((q_NHE, *kv_NJE), places, strict=True)
    )
    return q, k, v


def _in_order(plan: AttentionPlan, x_NHE: Tensor) -> Tensor:
    """Reorder rows from the order of buckets, with padding, to the order of the flat tokens."""
    return x_NHE if plan.where_N is None else x_NHE.index_select(0, plan.where_N)


def _summed(plan: AttentionPlan, parts: list[Tensor]) -> Tensor:
    """Return the gradient of keys or values, of shape (N, J, E), from the gradients of all buckets.

    The gradients of all buckets have shape (B, M, J, E). A prefix receives a gradient from each of its branches.
    """
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


def attention(
    q_BLHE: Tensor,
    k_BMJE: Tensor,
    v_BMJE: Tensor,
    mask_BLM: Tensor | None,
    scale: float,
    cap: float | None = None,
) -> Tensor:
    """Return attention outputs, of shape (B, L, H, E). The mask is True where a query may attend; None means plain causal.

    The last keys are the queries' own keys. With or without a mask, no query attends to a key after its own key.
    """
    if by_products(q_BLHE, k_BMJE.shape[1], cap):
        gathered: Tensor = _AttentionByProducts.apply(q_BLHE, k_BMJE, v_BMJE, mask_BLM, scale, cap)  # type: ignore[no-untyped-call]
        return gathered
    mask_B1LM = None if mask_BLM is None else mask_BLM[:, None]
    q_BHLE, k_BJME, v_BJME = (x.transpose(1, 2) for x in (q_BLHE, k_BMJE, v_BMJE))
    return fused_attention(q_BHLE, k_BJME, v_BJME, mask_B1LM, causal=mask_BLM is None, scale=scale).transpose(
        1, 2
    )


def by_products(q: Tensor, keys: int, cap: float | None) -> bool:
    """Return whether attention by products is faster for this many keys, or is needed because torch's kernels have no soft cap."""
    return cap is not None or (q.device.type == "cpu" and keys <= PRODUCT_KEYS)


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """Cap scores in place with cap · tanh(score / cap)."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def fused_attention(
    q_BHLE: Tensor,
    k_BJME: Tensor,
    v_BJME: Tensor,
    mask_B1LM: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    """Return the outputs of torch's fused attention, of shape (B, H, L, E), using a kernel that stores no attention weights."""
    each = q_BHLE.shape[1] // k_BJME.shape[1]
    if each > 1 and repeats_keys(q_BHLE.device, q_BHLE.dtype, masked=mask_B1LM is not None):
        k_BJME, v_BJME, each = k_BJME.repeat_interleave(each, 1), v_BJME.repeat_interleave(each, 1), 1
    fused_BHLE: Tensor = scaled_dot_product_attention(
        q_BHLE, k_BJME, v_BJME, mask_B1LM, is_causal=causal, scale=scale, enable_gqa=each > 1
    )
    return fused_BHLE


def repeats_keys(device: torch.device, dtype: torch.dtype, *, masked: bool) -> bool:
    """Return whether key heads are repeated for their query heads before fused attention.

    On CUDA, only the flash kernel supports query heads that share a key head, in half precision and without a mask. In
    other cases, torch would fall back to products that store the weights of all pairs of tokens.
    """
    return device.type == "cuda" and (masked or dtype not in (torch.float16, torch.bfloat16))


class _AttentionByProducts(torch.autograd.Function):
    """Computes softmax(q·kᵀ)·v for one set of sequences."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BLHE: Tensor,
        k_BMJE: Tensor,
        v_BMJE: Tensor,
        mask_BLM: Tensor | None,
        scale: float,
        cap: float | None,
    ) -> Tensor:
        out_BLHE = torch.empty_like(q_BLHE, memory_format=torch.contiguous_format)
        ctx.save_for_backward(*forward_products(q_BLHE, k_BMJE, v_BMJE, mask_BLM, scale, cap, out_BLHE))
        ctx.scale, ctx.cap = scale, cap
        return out_BLHE

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        dq_BLHE = torch.empty_like(given[0], memory_format=torch.contiguous_format)
        dk_BJME, dv_BJME = backward_products(ctx.saved_tensors, given[0], ctx.scale, ctx.cap, dq_BLHE)
        return dq_BLHE, dk_BJME.transpose(1, 2), dv_BJME.transpose(1, 2), None, None, None


def forward_products(
    q_BLHE: Tensor,
    k_BMJE: Tensor,
    v_BMJE: Tensor,
    mask_BLM: Tensor | None,
    scale: float,
    cap: float | None,
    out_BLHE: Tensor,
) -> list[Tensor]:
    """Fill `out_BLHE` with softmax(q·kᵀ)·v, and return the tensors that the backward pass needs.

    Query heads that share a key head are stacked in one product.
    """
    heads, keys, length = k_BMJE.shape[2], k_BMJE.shape[1], q_BLHE.shape[1]
    k_PME, v_PME = _paired(k_BMJE, heads), _paired(v_BMJE, heads)
    # −∞ where a query must not attend; this is added to the scores.
    if mask_BLM is None:
        hidden_BLM = torch.full((1, length, length), float("-inf"), dtype=q_BLHE.dtype, device=q_BLHE.device)
        hidden_BLM.triu_(1)
    else:
        hidden_BLM = torch.zeros(mask_BLM.shape, dtype=q_BLHE.dtype, device=q_BLHE.device)
        hidden_BLM.masked_fill_(~mask_BLM, float("-inf"))
    kept: list[Tensor] = [k_PME, v_PME]
    for first in range(0, length, QUERY_STEP):
        rows, seen = slice(first, first + QUERY_STEP), keys - max(0, length - first - QUERY_STEP)
        q_PSE = _paired(q_BLHE[:, rows], heads).mul_(scale)
        weight_PSM = capped(torch.bmm(q_PSE, k_PME[:, :seen].transpose(1, 2)), cap)
        scores = weight_PSM.view(len(q_BLHE), q_BLHE.shape[2], -1, seen)
        scores.add_(hidden_BLM[:, None, rows, :seen])
        torch.softmax(weight_PSM, -1, out=weight_PSM)
        _unpair(torch.bmm(weight_PSM, v_PME[:, :seen]), out_BLHE[:, rows])
        kept += (q_PSE, weight_PSM)
    return kept


def backward_products(
    kept: Sequence[Tensor], dout_BLHE: Tensor, scale: float, cap: float | None, dq_BLHE: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill `dq_BLHE` using the tensors from `forward_products`, and return the gradients of keys and values.

    Both gradients have shape (B, J, M, E).
    """
    k_PME, v_PME, *steps = kept
    keys, heads = k_PME.shape[1], len(k_PME) // len(dout_BLHE)
    dk_PME, dv_PME = torch.empty_like(k_PME), torch.empty_like(v_PME)
    # Start with the last queries, which attend to all keys, so that the first product fills every gradient.
    for number in reversed(range(len(steps) // 2)):
        q_PSE, weight_PSM = steps[2 * number : 2 * number + 2]
        rows, seen = slice(number * QUERY_STEP, (number + 1) * QUERY_STEP), weight_PSM.shape[2]
        beta = 0 if seen == keys else 1
        dout_PSE = _paired(dout_BLHE[:, rows], heads)
        dv_PME[:, :seen].baddbmm_(weight_PSM.transpose(1, 2), dout_PSE, beta=beta)
        dweight_PSM = torch.bmm(dout_PSE, v_PME[:, :seen].transpose(1, 2))
        dscore_PSM = torch._softmax_backward_data(dweight_PSM, weight_PSM, -1, weight_PSM.dtype)  # noqa: SLF001 — the one public name of this kernel is autograd
        if cap is not None:  # the derivative of the cap is 1 − tanh²
            tanh_PSM = torch.bmm(q_PSE, k_PME[:, :seen].transpose(1, 2)).div_(cap).tanh_()
            dscore_PSM.mul_(tanh_PSM.square_().neg_().add_(1))
        dk_PME[:, :seen].baddbmm_(dscore_PSM.transpose(1, 2), q_PSE, beta=beta)
        _unpair(torch.bmm(dscore_PSM, k_PME[:, :seen]).mul_(scale), dq_BLHE[:, rows])
    size = len(dq_BLHE)
    return dk_PME.view(size, heads, keys, -1), dv_PME.view(size, heads, keys, -1)


def _paired(x_BLHE: Tensor, heads: int) -> Tensor:
    """Return a copy of shape (P, S, E), which contains the stacked queries of each pair of a sequence and a key head."""
    size, length, all_heads, width = x_BLHE.shape
    paired = torch.empty(size, all_heads, length, width, dtype=x_BLHE.dtype, device=x_BLHE.device)
    paired.copy_(x_BLHE.transpose(1, 2))
    return paired.view(size * heads, -1, width)


def _unpair(x_PSE: Tensor, into_BLHE: Tensor) -> None:
    size, length, heads, width = into_BLHE.shape
    into_BLHE.transpose(1, 2).copy_(x_PSE.view(size, heads, length, width))
