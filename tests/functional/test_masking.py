"""Facts about masked statistics, segments, and the aggregation of losses."""

import math

import pytest
import torch

from kapelle.functional import masking
from kapelle.functional.masking import WeightedSum

F64 = torch.float64
# Two completions of 3 and 1 tokens; the second row is padded with poison that must never be read.
LOSS_NT = torch.tensor([[1.0, 2.0, 6.0], [5.0, math.nan, math.inf]], dtype=F64)
MASK_NT = torch.tensor([[True, True, True], [True, False, False]])
# The same four tokens packed.
LOSS_K = torch.tensor([1.0, 2.0, 6.0, 5.0], dtype=F64)
SEGMENT_K = torch.tensor([0, 0, 0, 1])
MASK_K = torch.ones(4, dtype=torch.bool)


def ratio(pair: WeightedSum) -> float:
    return float(pair.total / pair.weight)


def numbers(pair: WeightedSum) -> list[float]:
    return [pair.total.item(), pair.weight.item()]


def test_statistics_read_unmasked_entries_only() -> None:
    # Entries 1, 2, 6, 5: sum 14, mean 3.5, squared deviations 6.25 + 2.25 + 6.25 + 2.25 = 17, /3.
    assert masking.masked_sum(LOSS_NT, MASK_NT).item() == 14.0
    assert masking.masked_mean(LOSS_NT, MASK_NT).item() == 3.5
    assert masking.masked_var(LOSS_NT, MASK_NT).item() == pytest.approx(17 / 3, abs=1e-15)


def test_whitening_takes_the_mean_off_and_scales_by_the_unbiased_deviation() -> None:
    # Entries 2 and 6: mean 4, variance 4 + 4 = 8 (ddof 1), so ∓2/√8 = ∓0.70710678.
    x = torch.tensor([[2.0, math.nan, 6.0]], dtype=F64)
    mask = torch.tensor([[1.0, 0.0, 1.0]], dtype=F64)
    whitened = masking.masked_whiten(x, mask)
    expected = torch.tensor([[-math.sqrt(0.5), 0.0, math.sqrt(0.5)]], dtype=F64)
    torch.testing.assert_close(whitened, expected, atol=1e-8, rtol=0)


def test_whitening_of_one_entry_or_of_none_is_zero_and_finite() -> None:
    x = torch.tensor([3.0, 9.0])
    assert masking.masked_whiten(x, torch.tensor([1, 0])).tolist() == [0.0, 0.0]
    assert masking.masked_whiten(x, torch.tensor([0, 0])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e6 + 0.1])
def test_whitening_of_equal_entries_is_exactly_zero_in_float32(value: float) -> None:
    # In float32 the mean of eight 0.1 is 7e-9 too large; over √1e-8 the rounding would grow 10,000 times.
    x, ones, label = torch.full((8,), value), torch.ones(8), torch.zeros(8, dtype=torch.int64)
    assert masking.masked_whiten(x, ones).tolist() == [0.0] * 8
    assert masking.segment_whiten(x, ones, label, 2).tolist() == [0.0] * 8


def test_the_least_of_a_segment_is_of_its_unmasked_entries() -> None:
    x, mask = torch.tensor([3.0, -9.0, -2.0, math.nan]), torch.tensor([1, 0, 1, 0])
    assert masking.segment_least(x, mask, torch.tensor([0, 0, 1, 2]), 3).tolist() == [3.0, -2.0, 0.0]


def test_poison_under_the_mask_does_not_reach_the_gradient() -> None:
    x = LOSS_NT.clone().requires_grad_()
    masking.masked_mean(x, MASK_NT).backward()
    # d mean / dx = 1/4 on the four unmasked entries.
    assert x.grad is not None
    assert x.grad.tolist() == [[0.25, 0.25, 0.25], [0.25, 0.0, 0.0]]


def test_segments_by_hand() -> None:
    # Segment 0 holds 1, 2, 6: sum 9, mean 3, variance (4 + 1 + 9)/2 = 7. Segment 1 holds 5. Segment 2 is empty.
    assert masking.segment_sum(LOSS_K, MASK_K, SEGMENT_K, 3).tolist() == [9.0, 5.0, 0.0]
    assert masking.segment_count(MASK_K, SEGMENT_K, 3).tolist() == [3, 1, 0]
    assert masking.segment_mean(LOSS_K, MASK_K, SEGMENT_K, 3).tolist() == [3.0, 5.0, 0.0]
    assert masking.segment_var(LOSS_K, MASK_K, SEGMENT_K, 3).tolist() == [7.0, 0.0, 0.0]


def test_whitening_by_segment_centres_each_on_its_own() -> None:
    x = torch.tensor([1.0, 10.0, 3.0, 30.0], dtype=F64)
    label = torch.tensor([0, 1, 0, 1])
    # {1, 3}: ∓1/√2; {10, 30}: ∓10/√200 = ∓1/√2.
    whitened = masking.segment_whiten(x, torch.ones(4), label, 2)
    expected = torch.tensor([-1.0, -1.0, 1.0, 1.0], dtype=F64) / math.sqrt(2)
    torch.testing.assert_close(whitened, expected, atol=1e-8, rtol=0)


def test_the_three_aggregations_by_hand() -> None:
    # token_mean: 14/4. sequence_mean: (9/3 + 5/1)/2 = 4. sum over 10: (9/10 + 5/10)/2 = 0.7.
    assert ratio(masking.token_mean(LOSS_K, MASK_K)) == 3.5
    assert ratio(masking.sequence_mean(LOSS_K, MASK_K, SEGMENT_K, 2)) == 4.0
    constant = masking.sequence_sum_over_constant(LOSS_K, MASK_K, SEGMENT_K, 2, constant=10.0)
    assert ratio(constant) == pytest.approx(0.7, abs=1e-15)


def test_a_sequence_without_unmasked_tokens_bears_no_weight() -> None:
    mask_K = torch.tensor([1, 1, 1, 0])
    assert numbers(masking.sequence_mean(LOSS_K, mask_K, SEGMENT_K, 2)) == [3.0, 1.0]
    assert numbers(masking.sequence_sum_over_constant(LOSS_K, mask_K, SEGMENT_K, 2, constant=3.0)) == [
        3.0,
        1.0,
    ]
    assert numbers(masking.sequence_total(torch.tensor([2.0, math.nan]), torch.tensor([3, 0]))) == [2.0, 1.0]


def test_pack_and_unpack_are_inverse() -> None:
    packed = masking.pack(LOSS_NT, MASK_NT)
    assert packed.tolist() == LOSS_K.tolist()
    rows = torch.tensor([[0, 0, 0], [1, 1, 1]])
    assert masking.pack(rows, MASK_NT).tolist() == SEGMENT_K.tolist()
    assert masking.unpack(packed, MASK_NT).tolist() == [[1.0, 2.0, 6.0], [5.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("first", "last"), [(0, 70), (0, 96), (5, 40), (31, 33), (32, 64), (64, 64), (69, 70)]
)
def test_bits_are_read_lowest_first_from_any_place(first: int, last: int) -> None:
    set_places = [0, 5, 31, 32, 33, 63, 69, 95]
    words = [sum(1 << place % 32 for place in set_places if place // 32 == word) for word in range(3)]
    signed = [word - (1 << 32) if word >= 1 << 31 else word for word in words]
    bits_RW = torch.tensor([signed, [-1, -1, -1], [0, 0, 0]], dtype=torch.int32)
    found = masking.allowed_words(bits_RW, first, last)
    expected = [place in set_places for place in range(first, last)]
    assert found.tolist() == [expected, [True] * (last - first), [False] * (last - first)]
    for dtype in (torch.float32, torch.bfloat16):
        limits = masking.allowed_limits(bits_RW, first, last, dtype)
        assert limits.dtype == dtype
        assert limits.tolist() == [[math.inf if on else -math.inf for on in row] for row in found.tolist()]
