"""Compute masked statistics and sums by label, and aggregate losses into pairs (sum, weight).

Shapes: N sequences (one completion each), T padded tokens, K packed tokens of all sequences in a row, S segments (the segment
of a packed token is the sequence to which it belongs), L labels, B rows. Masks are bool or float tensors; an entry counts if
its mask is not zero. Masked entries can have any value, including NaN: they do not affect the result, and their gradient is
0.

A packed batch and a padded batch give the same results if the padded tensors are flattened, each position is labelled with
its row, and the padding is masked.
"""

from __future__ import annotations

from typing import NamedTuple

from kapelle.runtime.on_demand import Tensor, torch


class WeightedSum(NamedTuple):
    """A loss before normalisation. The engine divides the sum of `total` by the sum of `weight` over the global batch."""

    total: Tensor
    weight: Tensor


def as_float(x: Tensor) -> Tensor:
    """Return `x` in float64 if it already has this type, and in float32 otherwise."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def keep_masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` as a float tensor with 0 at masked entries. A product with the mask would propagate NaN."""
    x = as_float(x)
    return torch.where(mask.bool(), x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the unmasked entries as a scalar."""
    return keep_masked(x, mask).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the unmasked entries as a scalar, or 0 if there are none."""
    x = keep_masked(x, mask)
    return x.sum() / mask.bool().sum().clamp(min=1).to(x.dtype)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Return the unbiased variance (ddof 1) of the unmasked entries as a scalar, or 0 if there are fewer than two."""
    deviation = keep_masked(as_float(x) - masked_mean(x, mask), mask)
    return deviation.square().sum() / (mask.bool().sum() - 1).clamp(min=1).to(deviation.dtype)


def masked_whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Return (x − mean)·rsqrt(var + eps) over the unmasked entries. Masked entries become 0, and the shape is unchanged."""
    everywhere = torch.zeros(x.numel(), dtype=torch.int64, device=x.device)
    return segment_whiten(x.reshape(-1), mask.reshape(-1), everywhere, 1, eps=eps).view_as(x)


def segment_sum(x_K: Tensor, mask_K: Tensor, segment_K: Tensor, segments: int) -> Tensor:
    """Return the sum of the unmasked entries of each segment as a tensor [S]. The sum of an empty segment is 0."""
    x_K = keep_masked(x_K, mask_K)
    return x_K.new_zeros(segments).index_add(0, segment_K, x_K)


def segment_count(mask_K: Tensor, segment_K: Tensor, segments: int) -> Tensor:
    """Return the number of unmasked entries of each segment as an int64 tensor [S]."""
    return segment_K.new_zeros(segments).index_add(0, segment_K, mask_K.bool().to(segment_K.dtype))


def segment_mean(x_K: Tensor, mask_K: Tensor, segment_K: Tensor, segments: int) -> Tensor:
    """Return the mean of the unmasked entries of each segment as a tensor [S]. The mean of an empty segment is 0."""
    total_S = segment_sum(x_K, mask_K, segment_K, segments)
    return total_S / segment_count(mask_K, segment_K, segments).clamp(min=1).to(total_S.dtype)


def segment_var(x_K: Tensor, mask_K: Tensor, segment_K: Tensor, segments: int) -> Tensor:
    """Return the unbiased variance (ddof 1) within each segment as a tensor [S].

    The variance is 0 for segments with fewer than two entries.
    """
    mean_S = segment_mean(x_K, mask_K, segment_K, segments)
    squared_S = segment_sum((as_float(x_K) - mean_S[segment_K]).square(), mask_K, segment_K, segments)
    return squared_S / (segment_count(mask_K, segment_K, segments) - 1).clamp(min=1).to(squared_S.dtype)


def segment_least(x_K: Tensor, mask_K: Tensor, segment_K: Tensor, segments: int) -> Tensor:
    """Return the smallest unmasked entry of each segment as a tensor [S]. The result is 0 for an empty segment."""
    x_K = keep_masked(x_K, mask_K)
    least_S = x_K.new_full((segments,), torch.inf)
    least_S = least_S.scatter_reduce(0, segment_K, x_K.masked_fill(~mask_K.bool(), torch.inf), "amin")
    return torch.where(segment_count(mask_K, segment_K, segments) > 0, least_S, 0.0)


def segment_whiten(
    x_K: Tensor, mask_K: Tensor, segment_K: Tensor, segments: int, *, eps: float = 1e-8
) -> Tensor:
    """Return the unmasked entries, whitened separately for each segment (for example per agent or per policy), as a tensor [K].

    The result is exactly 0 in segments with equal entries or with only one entry.
    """
    # Whitening is invariant to a shift. After subtracting the minimum, equal entries are exactly 0; x − mean would leave a
    # rounding error, which the division by √eps would amplify.
    x_K = as_float(x_K) - segment_least(x_K, mask_K, segment_K, segments)[segment_K]
    mean_S = segment_mean(x_K, mask_K, segment_K, segments)
    scale_S = torch.rsqrt(segment_var(x_K, mask_K, segment_K, segments) + eps)
    return keep_masked((x_K - mean_S[segment_K]) * scale_S[segment_K], mask_K)


def allowed_words(bits_RW: Tensor, first: int, last: int) -> Tensor:
    """Return whether the bit of each position in [first, last) is set, as a bool tensor (R, C).

    Each int32 word stores 32 bits, least significant bit first.
    """
    return _spread(bits_RW, first, last, _bits_of_bytes(bits_RW.device))


def allowed_limits(bits_RW: Tensor, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Return the upper limits of logits as a tensor (R, C): ∞ for positions whose bit is set, and −∞ for other positions.

    The minimum of a logit and its limit is either the logit or −∞. On a CPU, computing this minimum is several times as fast
    as filling with a mask.
    """
    limit_BK = torch.full((256, 8), -torch.inf, dtype=dtype, device=bits_RW.device)
    return _spread(bits_RW, first, last, limit_BK.masked_fill_(_bits_of_bytes(bits_RW.device), torch.inf))


def _bits_of_bytes(device: torch.device) -> Tensor:
    """Return the bits of every byte as a bool tensor of shape [256, 8], least significant bit first."""
    return ((torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1).bool()


def _spread(bits_RW: Tensor, first: int, last: int, table: Tensor) -> Tensor:
    """Return the entries of a table [256, 8] that belong to the bits of the positions in [first, last), as a tensor (R, C)."""
    low, high = first // 32, -(-last // 32)
    byte_B = bits_RW[:, low:high].contiguous().view(torch.uint8).flatten().int()
    spread_RC = table.index_select(0, byte_B).view(len(bits_RW), 32 * (high - low))
    return spread_RC[:, first - 32 * low : last - 32 * low]


def pack(x_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Return the unmasked entries of a padded batch, row after row, as a tensor [K]."""
    return x_NT[mask_NT.bool()]


def unpack(x_K: Tensor, mask_NT: Tensor) -> Tensor:
    """Return a padded tensor [N, T] with the packed entries at their positions and 0 elsewhere.

    This function is the inverse of `pack`.
    """
    return x_K.new_zeros(mask_NT.shape).masked_scatter(mask_NT.bool(), x_K)


def token_mean(loss_K: Tensor, mask_K: Tensor, times_K: Tensor | None = None) -> WeightedSum:
    """Aggregate losses of any shape so that every token of the global batch has equal weight (DAPO, arXiv:2503.14476, eq. 8).

    With `times_K`, each token counts that many times.
    """
    if times_K is None:
        total = masked_sum(loss_K, mask_K)
        return WeightedSum(total, mask_K.bool().sum().to(total.dtype))
    return WeightedSum(masked_sum(loss_K * times_K, mask_K), masked_sum(times_K, mask_K))


def sequence_mean(
    loss_K: Tensor, mask_K: Tensor, segment_K: Tensor, segments: int, times_K: Tensor | None = None
) -> WeightedSum:
    """Average losses over tokens and then over sequences, so that every sequence has equal weight (GRPO, arXiv:2402.03300, eq. 3).

    A sequence without an unmasked token has weight 0. With `times_K`, which must be equal for all tokens of a sequence, each
    sequence counts that many times. Microbatches must contain whole sequences.
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
    """Sum losses over tokens and divide by a constant, so that all tokens have equal weight (Dr.GRPO, arXiv:2503.20783).

    The constant is a number of tokens, usually the maximum length of a completion. The weight is the number of sequences with
    an unmasked token, each counted `times_K` times.
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
    """Sum losses with one value per sequence or turn, excluding sequences without tokens."""
    total = masked_sum(loss_S, count_S)
    return WeightedSum(total, count_S.bool().sum().to(total.dtype))
