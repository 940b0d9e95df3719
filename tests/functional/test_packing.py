"""Padding, packing and any split into microbatches give the same loss and the same gradient."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kapelle.functional import divergences, masking, policy_losses
from kapelle.functional.masking import WeightedSum

F64 = torch.float64
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], WeightedSum]


def token_level(
    logp: Tensor, behaviour: Tensor, advantage_S: Tensor, mask: Tensor, segment: Tensor, segments: int
) -> WeightedSum:
    log_ratio = policy_losses.token_log_ratio(logp, behaviour)
    loss = policy_losses.clipped_surrogate(log_ratio, advantage_S[segment], clip_low=0.2, clip_high=0.3).loss
    return masking.token_mean(loss + 0.1 * divergences.kl_k3(logp, behaviour), mask)


def sequence_mean_of_tokens(
    logp: Tensor, behaviour: Tensor, advantage_S: Tensor, mask: Tensor, segment: Tensor, segments: int
) -> WeightedSum:
    log_ratio = policy_losses.token_log_ratio(logp, behaviour)
    loss = policy_losses.cispo(logp, log_ratio, advantage_S[segment], clip_low=0.2, clip_high=0.3).loss
    return masking.sequence_mean(loss, mask, segment, segments)


def constant_level(
    logp: Tensor, behaviour: Tensor, advantage_S: Tensor, mask: Tensor, segment: Tensor, segments: int
) -> WeightedSum:
    log_ratio = policy_losses.token_log_ratio(logp, behaviour)
    loss = policy_losses.dual_clipped_surrogate(
        log_ratio, advantage_S[segment], clip_low=0.2, clip_high=0.3
    ).loss
    return masking.sequence_sum_over_constant(loss, mask, segment, segments, constant=7.0)


def with_one_ratio_by(log_ratio_of: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]) -> Loss:
    """The loss with one ratio for each sequence, as `turn_log_ratio` or `sequence_log_ratio` computes it."""

    def loss_of(
        logp: Tensor, behaviour: Tensor, advantage_S: Tensor, mask: Tensor, segment: Tensor, segments: int
    ) -> WeightedSum:
        log_ratio = log_ratio_of(logp, behaviour, mask, segment, segments)
        loss = policy_losses.clipped_surrogate(log_ratio, advantage_S, clip_low=0.2, clip_high=0.3).loss
        return masking.sequence_total(loss, masking.segment_count(mask, segment, segments))

    return loss_of


turn_level = with_one_ratio_by(policy_losses.turn_log_ratio)
sequence_level = with_one_ratio_by(policy_losses.sequence_log_ratio)

LOSSES: list[Loss] = [token_level, sequence_mean_of_tokens, constant_level, turn_level, sequence_level]


def rows_of(present: Tensor) -> Tensor:
    """Label each position of a padded batch, flattened, with its row."""
    return torch.arange(present.shape[0]).repeat_interleave(present.shape[1])


def batch(seed: int, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random padded log-probs, behaviour log-probs, presence and loss mask [N, T], and advantages [N]."""
    generator = torch.Generator().manual_seed(seed)
    n, longest = len(lengths), max(*lengths, 1)
    logp = -torch.rand(n, longest, generator=generator, dtype=F64) * 3
    behaviour = logp + 0.3 * torch.randn(n, longest, generator=generator, dtype=F64)
    present = torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)
    trained = present & (torch.rand(n, longest, generator=generator) < 0.8)
    advantage = torch.randn(n, generator=generator, dtype=F64)
    return logp, behaviour, present, trained, advantage


@pytest.mark.parametrize("loss", LOSSES)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 5), min_size=2, max_size=5))
def test_padding_equals_packing(loss: Loss, seed: int, lengths: list[int]) -> None:
    logp, behaviour, present, trained, advantage = batch(seed, lengths)
    n = len(lengths)

    padded = logp.masked_fill(~present, -7.0).requires_grad_()
    segment = rows_of(present)
    there = loss(padded.reshape(-1), behaviour.reshape(-1), advantage, trained.reshape(-1), segment, n)
    (there_grad,) = torch.autograd.grad(there.total, padded, allow_unused=True)

    packed = masking.pack(logp, present).requires_grad_()
    segment_K = masking.pack(segment.view_as(present), present)
    here = loss(
        packed,
        masking.pack(behaviour, present),
        advantage,
        masking.pack(trained, present),
        segment_K,
        n,
    )
    (here_grad,) = torch.autograd.grad(here.total, packed, allow_unused=True)

    torch.testing.assert_close(here.total, there.total, atol=1e-12, rtol=1e-12)
    assert here.weight == there.weight
    torch.testing.assert_close(masking.unpack(here_grad, present), there_grad, atol=1e-12, rtol=1e-12)
