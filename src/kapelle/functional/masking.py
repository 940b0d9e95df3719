"""Masked statistics, sums by label, and the aggregation of losses into (sum, weight).

Shapes: N sequences (one completion each), T padded tokens, K packed tokens of all sequences in a
row, S segments (a segment is the sequence that a packed token belongs to), L labels, B rows.
`mask` is bool or float; an entry counts if its mask is not zero. Other entries can have any value, including NaN: they do
not affect the result, and their gradient is 0.

A packed batch and a padded batch give the same numbers: flatten the padded tensors, label each position with its row, and
mask the padding.
"""

from __future__ import annotations

from typing import NamedTuple

from kapelle.runtime.on_demand import Tensor, torch


class WeightedSum(NamedTuple):
    """A loss before its normalisation: the engine divides Σ total by Σ weight of the global batch."""

    total: Tensor
    weight: Tensor


def as_float(x: Tensor) -> Tensor:
    """Return x in float64 if it already has that type, otherwise in float32; the result is never integer or half precision."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def keep_masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return x as float with 0 at masked entries (a product would propagate NaN)."""
    x = as_float(x)
    return torch.where(mask.bool(), x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the unmasked entries, a scalar."""
    return keep_masked(x, mask).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the unmasked entries, a scalar; 0 if there are none."""
    x = keep_masked(x, mask)
    return x.sum() / mask.bool().sum().clamp(min=1).to(x.dtype)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Return the unbiased variance (ddof 1) of the unmasked entries, a scalar; 0 if there are fewer than two."""
    deviation = keep_masked(as_float(x) - masked_mean(x, mask), mask)
    return deviation.square().sum() / (mask.bool().sum() - 1).clamp(min=1).to(deviation.dtype)


def masked_whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Whiten the unmasked entries, (x − mean)·rsqrt(var + eps); masked entries become 0, and the shape is unchanged."""
    everywhere = torch.zeros(x.numel(), dtype=torch.int64, device=x.device)
    return segment_whiten(x.reshape(-1), mask.reshape(-1), everywhere, 1, eps=eps).view_as(x)


def segment_sum(x_K: Tensor, mask_K: Tensor, segment_K: Tensor, segments: int) -> Tensor:
    """Sum the unmasked entries of each segment → [S]; an empty segment gives 0."""
    x_K = keep_masked(x_K, mask_K)
    return x_K.new_zeros(segments).index_add(0, segment_K, x_K)


def segment_count(mask_K: Tensor, segment_K: Tensor, segments: int) -> Tensor:
    """Count the unmasked entries of each segment → int64 [S]."""
    return segment_K.new_zeros(segments).index_add(0, segment_K, mask_K.bool().to(segment_K.dtype))


def segment_mean(x_K: Tensor, mask_K: Tensor, segment_K: Tensor, segments: int) -> Tensor:
    """Average the unmasked entries of each segment → [S]; an empty segment gives 0."""
    total_S = segment_sum(x_K, mask_K, segment_K, segments)
    return total_S / segment_count(mask_K, segment_K, segments).clamp(min=1).to(total_S.dtype)


def segment_var(x_K: Tensor, mask_K: Tensor, segment_K: Tensor, segments: int) -> Tensor:
    """Return the unbiased variance (ddof 1) within each segment → [S]; 0 for a segment with fewer than two entries."""
    mean_S = segment_mean(x_K, mask_K, segment_K, segments)
    squared_S = segment_sum((as_float(x_K) - mean_S[segment_K]).square(), mask_K, segment_K, segments)
    return squared_S / (segment_count(mask_K, segment_K, segments) - 1).clamp(min=1).to(squared_S.dtype)


def segment_least(x_K: Tensor, mask_K: Tensor, segment_K: Tensor, segments: int) -> Tensor:
    """Return the smallest unmasked entry of each segment → [S]; an empty segment gives 0."""
    x_K = keep_masked(x_K, mask_K)
    least_S = x_K.new_full((segments,), torch.inf)
    least_S = least_S.scatter_reduce(0, segment_K, x_K.masked_fill(~mask_K.bool(), torch.inf), "amin")
    return torch.where(segment_count(mask_K, segment_K, segments) > 0, least_S, 0.0)


def segment_whiten(
    x_K: Tensor, mask_K: Tensor, segment_K: Tensor, segments: int, *, eps: float = 1e-8
) -> Tensor:
    """Whiten the unmasked entries of each segment separately, e.g. per agent or per policy → [K].

    A segment without variance, or with one entry, gives exactly 0.
    """
    # Whitening is invariant to a shift. After subtracting the minimum, equal entries are exactly 0; x − mean would leave a
    # rounding error, which the division by √eps would amplify.
    x_K = as_float(x_K) - segment_least(x_K, mask_K, segment_K, segments)[segment_K]
    mean_S = segment_mean(x_K, mask_K, segment_K, segments)
    scale_S = torch.rsqrt(segment_var(x_K, mask_K, segment_K, segments) + eps)
    return keep_masked((x_K - mean_S[segment_K]) * scale_S[segment_K], mask_K)


def allowed_words(bits_RW: Tensor, first: int, last: int) -> Tensor:
    """Return `_RC` whether the bit of each position from `first` to before `last` is set; an int32 has 32 bits, lowest first."""
    return _spread(bits_RW, first, last, _bits_of_bytes(bits_RW.device))


def allowed_limits(bits_RW: Tensor, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Return `_RC` the upper limits of logits: ∞ for positions with their bit set, −∞ for others.

    The minimum of logit and limit is the logit, or −∞. On a CPU this is several times as fast as filling with a mask.
    """
    limit_BK = torch.full((256, 8), -torch.inf, dtype=dtype, device=bits_RW.device)
    return _spread(bits_RW, first, last, limit_BK.masked_fill_(_bits_of_bytes(bits_RW.device), torch.inf))


def _bits_of_bytes(device: torch.device) -> Tensor:
    """Return `[256, 8]` the bits of every byte, the lowest first."""
    return ((torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1).bool()


def _spread(bits_RW: Tensor, first: int, last: int, table: Tensor) -> Tensor:
    """Return `_RC` the entries of a table `[256, 8]` for the bits of the positions from `first` to before `last`."""
    low, high = first // 32, -(-last // 32)
    byte_B = bits_RW[:, low:high].contiguous().view(torch.uint8).flatten().int()
    spread_RC = table.index_select(0, byte_B).view(len(bits_RW), 32 * (high - low))
    return spread_RC[:, first - 32 * low : last - 32 * low]


def pack(x_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Return the unmasked entries of a padded batch, row after row → [K]."""
    return x_NT[mask_NT.bool()]


def unpack(x_K: Tensor, mask_NT: Tensor) -> Tensor:
    """Return packed entries at their padded positions, 0 elsewhere → [N, T]; the inverse of `pack`."""
    return x_K.new_zeros(mask_NT.shape).masked_scatter(mask_NT.bool(), x_K)


def token_mean(loss_K: Tensor, mask_K: Tensor, times_K: Tensor | None = None) -> WeightedSum:
    """Average over tokens: every token of the global batch has equal weight (DAPO, arXiv 2503.14476, eq. 8); any shape.

    With `times_K`, a token counts that many times.
    """
    if times_K is None:
        total = masked_sum(loss_K, mask_K)
        return WeightedSum(total, mask_K.bool().sum().to(total.dtype))
    return WeightedSum(masked_sum(loss_K * times_K, mask_K), masked_sum(times_K, mask_K))


def sequence_mean(
    loss_K: Tensor, mask_K: Tensor, segment_K: Tensor, segments: int, times_K: Tensor | None = None
) -> WeightedSum:
    """Average over tokens, then over sequences: every sequence has equal weight (GRPO, arXiv 2402.03300, eq. 3).

    A sequence without an unmasked token has weight 0. With `times_K`, equal for all tokens of a sequence, it counts that many
    times. Microbatches must contain whole sequences.
    """
    mean_S = segment_mean(loss_K, mask_K, segment_K, segments)
    return _sequence_totals(mean_S, mask_K, segment_K, segments, times_K)


def sequence_sum_over_constant(
    loss_K: Tensor,
    mask_K: Tensor,
    segment_K: Tensor,
    segments: int,
    times_K: Tensor | None = None,
    *,
    constant: float,
) -> WeightedSum:
    """Sum over tokens and divide by a constant, so that tokens have equal weight whatever the length (Dr.GRPO, arXiv 2503.20783).

    The constant is in tokens, commonly the completion limit. The weight is the number of sequences with an unmasked token,
    each counted `times_K` times.
    """
    total_S = segment_sum(loss_K, mask_K, segment_K, segments) / constant
    return _sequence_totals(total_S, mask_K, segment_K, segments, times_K)


def _sequence_totals(
    loss_S: Tensor, mask_K: Tensor, segment_K: Tensor, segments: int, times_K: Tensor | None
) -> WeightedSum:
    count_S = segment_count(mask_K, segment_K, segments)
    if times_K is None:
        return sequence_total(loss_S, count_S)
    times_S = segment_mean(times_K, mask_K, segment_K, segments)
    return WeightedSum(masked_sum(loss_S * times_S, count_S), masked_sum(times_S, count_S))


def sequence_total(loss_S: Tensor, count_S: Tensor) -> WeightedSum:
    """Sum losses with one value per sequence or turn, excluding those with 0 tokens."""
    total = masked_sum(loss_S, count_S)
    return WeightedSum(total, count_S.bool().sum().to(total.dtype))
