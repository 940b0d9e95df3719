"""Plans of attention: which flat tokens attend to which.

Shapes: N flat tokens, B sequences of a bucket, L longest queries, M longest keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WASTE = 0.1
"""Most of a bucket that may be padding: fewer, larger calls against idle work."""


class Bucket(NamedTuple):
    """Sequences of about one length whose attention is computed together; B of them."""

    query_BL: Tensor
    """Flat place of each query token; padding at the end repeats a place."""
    key_BM: Tensor | None
    """Flat place of each key token; None where keys are the queries and attention is plain causal."""
    mask_BLM: Tensor | None
    """True where a query may attend to a key; None with `key_BM` None."""


class Plan(NamedTuple):
    """Which tokens attend to which."""

    buckets: tuple[Bucket, ...]
    where_N: Tensor | None
    """Place of each flat token in the buckets' queries, one bucket after another; None if the order is the same."""


class Span(NamedTuple):
    """A run of flat tokens that attend causally to each other, and to all of a prefix."""

    start: int
    length: int
    prefix: tuple[int, int] | None
    """(start, length) of the prefix; None without one."""


def plan_sequences(lengths: Sequence[int], device: torch.device | str = "cpu") -> Plan:
    """Return a plan for sequences laid one after another, each with causal attention to itself alone."""
    spans: list[Span] = []
    for length in lengths:
        spans.append(Span(spans[-1].start + spans[-1].length if spans else 0, length, None))
    return plan_spans(spans, device)


def plan_spans(spans: Sequence[Span], device: torch.device | str = "cpu") -> Plan:
    """Return the plan of spans that cover the flat tokens in order."""
    lengths = {span.length for span in spans}
    if len(lengths) == 1 and all(span.prefix is None for span in spans):
        places = torch.arange(sum(span.length for span in spans), device=device)
        return Plan((Bucket(places.view(len(spans), -1), None, None),), None)
    buckets: list[Bucket] = []
    where = torch.empty(sum(span.length for span in spans), dtype=torch.long)
    offset = 0
    alone = [span for span in spans if span.prefix is None]
    branches = [span for span in spans if span.prefix is not None]
    for members in (*_alike(alone), *_alike(branches)):
        query_BL, real_BL = _places([(span.start, span.length) for span in members])
        where[query_BL[real_BL]] = offset + torch.arange(real_BL.numel()).view_as(real_BL)[real_BL]
        offset += real_BL.numel()
        if members[0].prefix is None:
            buckets.append(Bucket(query_BL.to(device), None, None))
        else:
            key_BM, mask_BLM = _branch_keys(members, query_BL)
            buckets.append(Bucket(query_BL.to(device), key_BM.to(device), mask_BLM.to(device)))
    return Plan(tuple(buckets), where.to(device))


def _places(runs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return the places of runs (start, length), padded by their last one, and which are real."""
    start_B1 = torch.tensor([[start] for start, _ in runs])
    length_B1 = torch.tensor([[length] for _, length in runs])
    step_L = torch.arange(int(length_B1.max()))
    return start_B1 + torch.minimum(step_L, length_B1 - 1), step_L < length_B1


def _branch_keys(members: Sequence[Span], query_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys of branches, prefix first, and the mask over them."""
    prefix_BM, real_BM = _places([span.prefix for span in members if span.prefix is not None])
    length = query_BL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool).tril()
    mask_BLM = torch.cat(
        (real_BM[:, None].expand(-1, length, -1), causal_LL.expand(len(members), -1, -1)), dim=2
    )
    return torch.cat((prefix_BM, query_BL), dim=1), mask_BLM


def _alike(spans: Sequence[Span]) -> list[list[Span]]:
    """Group spans from the longest down, each group with at most `WASTE` padding; flat order inside."""
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
