"""Facts about advantages: hand-computed values, shift invariance, sets without variance."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kapelle.functional import advantages

F64 = torch.float64
GroupEstimator = Callable[[Tensor, Tensor, int], Tensor]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def opo_of_even_lengths(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    return advantages.length_weighted_baseline(reward_B, torch.full_like(group_B, 7), group_B, groups)


GROUP_ESTIMATORS: list[GroupEstimator] = [
    advantages.group_scaled,
    advantages.group_centred,
    advantages.leave_one_out,
    opo_of_even_lengths,
]

# Two sets, interleaved: {1, 2, 6} and {0, 1}.
REWARD_B = tensor(1.0, 0.0, 2.0, 1.0, 6.0)
GROUP_B = torch.tensor([0, 1, 0, 1, 0])


def test_group_scaled_by_hand() -> None:
    # {1, 2, 6}: mean 3, std √((4 + 1 + 9)/2) = √7. {0, 1}: mean ½, std √½.
    a, b = math.sqrt(7) + 1e-6, math.sqrt(0.5) + 1e-6
    expected = tensor(-2 / a, -0.5 / b, -1 / a, 0.5 / b, 3 / a)
    torch.testing.assert_close(advantages.group_scaled(REWARD_B, GROUP_B, 2), expected, atol=1e-12, rtol=0)


def test_group_centred_by_hand() -> None:
    assert advantages.group_centred(REWARD_B, GROUP_B, 2).tolist() == [-2.0, -0.5, -1.0, 0.5, 3.0]


def test_group_relative_by_hand() -> None:
    # {1, 2, 6}: (1 − 3)/3, (2 − 3)/3, (6 − 3)/3. {0, 1}: ∓½/½. Four with one success: (1 − ¼)/¼ and −1.
    found = advantages.group_relative(REWARD_B, GROUP_B, 2)
    torch.testing.assert_close(found, tensor(-2 / 3, -1.0, -1 / 3, 1.0, 1.0))
    rare = advantages.group_relative(tensor(0.0, 0.0, 1.0, 0.0), torch.zeros(4, dtype=torch.int64), 1)
    assert rare.tolist() == [-1.0, -1.0, 3.0, -1.0]


def test_leave_one_out_by_hand() -> None:
    # 1 − (2 + 6)/2 = −3; 2 − 7/2 = −1.5; 6 − 3/2 = 4.5; {0, 1}: ∓1.
    assert advantages.leave_one_out(REWARD_B, GROUP_B, 2).tolist() == [-3.0, -1.0, -1.5, 1.0, 4.5]


def test_length_weighted_baseline_by_hand() -> None:
    # {1, 2, 6} of 1, 2, 5 tokens: baseline (1 + 4 + 30)/8 = 4.375. {0, 1} of 3 and 1: ¼.
    length_B = torch.tensor([1, 3, 2, 1, 5])
    advantage = advantages.length_weighted_baseline(REWARD_B, length_B, GROUP_B, 2)
    assert advantage.tolist() == [-3.375, -0.25, -2.375, 0.75, 1.625]


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.7, 1e6 + 0.1])
def test_a_set_without_variance_gives_exactly_zero(
    estimator: GroupEstimator, dtype: torch.dtype, value: float
) -> None:
    # In float32 the mean of eight 0.1 is 7e-9 too large; over its std + 1e-6 that is an advantage of −0.0074
    # for every member, and a push away from all of them.
    advantage = estimator(torch.full((8,), value, dtype=dtype), torch.zeros(8, dtype=torch.int64), 1)
    assert advantage.tolist() == [0.0] * 8


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_set_of_one_has_nothing_to_be_compared_with(estimator: GroupEstimator) -> None:
    advantage = estimator(tensor(0.7, 1.0, 1.0), torch.tensor([1, 0, 0]), 2)
    assert advantage.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@given(
    rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=8),
    shift=st.floats(-100, 100),
    labels=st.integers(0, 10_000),
)
def test_a_shift_of_all_rewards_changes_nothing(
    estimator: GroupEstimator, rewards: list[float], shift: float, labels: int
) -> None:
    # Every reward twice, so that no set is left alone; scaled down to where eps 1e-6 does not decide.
    reward_B = tensor(*rewards, *rewards[::-1]).round(decimals=3)
    group_B = torch.randint(0, 3, (len(rewards),), generator=torch.Generator().manual_seed(labels))
    group_B = torch.cat([group_B, group_B.flip(0)])
    shifted = estimator(reward_B + shift, group_B, 3)
    torch.testing.assert_close(shifted, estimator(reward_B, group_B, 3), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@given(seed=st.integers(0, 10_000))
def test_a_set_knows_nothing_of_the_others(estimator: GroupEstimator, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    reward_B = torch.randn(8, generator=generator, dtype=F64)
    group_B = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
    alone = estimator(reward_B[group_B == 0], torch.zeros(4, dtype=torch.int64), 1)
    torch.testing.assert_close(estimator(reward_B, group_B, 2)[group_B == 0], alone)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_leave_one_out_is_the_centred_reward_times_n_over_n_minus_one(rewards: list[float]) -> None:
    # R_j − (S − R_j)/(n − 1) = n/(n − 1)·(R_j − S/n), arXiv 2402.14740.
    n, group_B = len(rewards), torch.zeros(len(rewards), dtype=torch.int64)
    centred = advantages.group_centred(tensor(*rewards), group_B, 1)
    loo = advantages.leave_one_out(tensor(*rewards), group_B, 1)
    torch.testing.assert_close(loo, centred * n / (n - 1), atol=1e-12, rtol=1e-12)


def test_running_baseline_by_hand() -> None:
    # b = 0: R = 1 → b = 0.05, A = 0.95; R = −1 → b = 0.0475 − 0.05 = −0.0025, A = −0.9975.
    advantage, baseline = advantages.running_baseline(tensor(1.0, -1.0), tensor(0.0)[0])
    assert advantage.tolist() == pytest.approx([0.95, -0.9975], abs=1e-15)
    assert baseline.item() == pytest.approx(-0.0025, abs=1e-15)


# GAE by hand: γ = 0.5, λ = 0.5, rewards 1, 2, 4, values 2, 1, 3, the row ends.
#   δ₂ = 4 − 3 = 1;  δ₁ = 2 + 1.5 − 1 = 2.5;  δ₀ = 1 + 0.5 − 2 = −0.5
#   A₂ = 1;  A₁ = 2.5 + 0.25 = 2.75;  A₀ = −0.5 + 0.25·2.75 = 0.1875
GAE_ADVANTAGE = [0.1875, 2.75, 1.0]
GAE_TARGET = [2.1875, 3.75, 4.0]


def test_gae_by_hand() -> None:
    result = advantages.gae(
        torch.tensor([[1, 2, 4]]),
        torch.tensor([[2, 1, 3]]),
        torch.ones(1, 3),
        torch.zeros(1),
        gamma=0.5,
        lam=0.5,
    )
    assert result.advantage_NT.tolist() == [GAE_ADVANTAGE]
    assert result.target_NT.tolist() == [GAE_TARGET]


def test_gae_passes_over_observation_tokens_and_padding() -> None:
    nan = math.nan
    result = advantages.gae(
        torch.tensor([[nan, 1.0, nan, nan, 2.0, 4.0, nan]], dtype=F64),
        torch.tensor([[9.0, 2.0, nan, 7.0, 1.0, 3.0, nan]], dtype=F64),
        torch.tensor([[0, 1, 0, 0, 1, 1, 0]]),
        torch.zeros(1),
        gamma=0.5,
        lam=0.5,
    )
    assert result.advantage_NT.tolist() == [[0.0, 0.1875, 0.0, 0.0, 2.75, 1.0, 0.0]]
    assert result.target_NT.tolist() == [[0.0, 2.1875, 0.0, 0.0, 3.75, 4.0, 0.0]]


THREE_STEPS = (tensor(1, 2, 4).view(1, 3), tensor(2, 1, 3).view(1, 3), torch.ones(1, 3))
"""Rewards, values and mask of one row."""


def test_a_truncated_row_bootstraps() -> None:
    # After the last step stands V = 8: δ₂ = 4 + 4 − 3 = 5, A₁ = 2.5 + 1.25 = 3.75, A₀ = −0.5 + 0.9375.
    result = advantages.gae(*THREE_STEPS, tensor(8), gamma=0.5, lam=0.5)
    assert result.advantage_NT.tolist() == [[0.4375, 3.75, 5.0]]


def test_gae_with_gamma_and_lambda_one_is_return_minus_value() -> None:
    # Returns 7, 6, 4 minus values 2, 1, 3.
    result = advantages.gae(*THREE_STEPS, tensor(0), gamma=1.0, lam=1.0)
    assert result.advantage_NT.tolist() == [[5.0, 5.0, 1.0]]
    assert result.target_NT.tolist() == [[7.0, 6.0, 4.0]]


def test_published_token_gae_returns() -> None:
    # torchtune, tests/torchtune/rlhf/test_rewards.py::test_estimate_returns, γ = 0.9, λ = 0.95.
    reward = value = tensor(0, 0, 0, 1).view(1, 4)
    result = advantages.gae(reward, value, torch.ones(1, 4), torch.zeros(1), gamma=0.9, lam=0.95)
    expected = tensor(0.6579225, 0.7695, 0.9, 1.0).view(1, 4)
    torch.testing.assert_close(result.target_NT, expected, atol=1e-12, rtol=0)


def test_no_gradient_leaves_an_estimator() -> None:
    value = torch.ones(1, 2, dtype=F64, requires_grad=True)
    result = advantages.gae(torch.ones(1, 2), value, torch.ones(1, 2), value[:, 0], gamma=0.9, lam=0.9)
    assert not result.advantage_NT.requires_grad
    assert not result.target_NT.requires_grad


@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_rows_do_not_mix_and_padding_does_nothing(seed: int, gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    reward, value = torch.randn(2, 3, 6, generator=generator, dtype=F64)
    mask = torch.rand(3, 6, generator=generator) < 0.6
    bootstrap = torch.randn(3, generator=generator, dtype=F64)
    batch = advantages.gae(reward, value, mask, bootstrap, gamma=gamma, lam=lam)
    for row in range(3):
        on = mask[row]
        alone = advantages.gae(
            reward[row, on].unsqueeze(0),
            value[row, on].unsqueeze(0),
            torch.ones(1, int(on.sum())),
            bootstrap[row : row + 1],
            gamma=gamma,
            lam=lam,
        )
        torch.testing.assert_close(batch.advantage_NT[row, on], alone.advantage_NT[0])
        assert batch.advantage_NT[row, ~on].eq(0).all()
