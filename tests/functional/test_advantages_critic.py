"""Facts about chains, V-trace, importance weights and MARS' normalisations."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kapelle.functional import advantages

F64 = torch.float64


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def row(*values: float) -> Tensor:
    return tensor(*values).unsqueeze(0)


def test_a_chain_of_two_agents_and_two_rounds_by_hand() -> None:
    # Solver, critic, solver, critic; values 1, 2, 3, 4; the critic closes with reward 8; γ = ½, λ = ½.
    #   δ₃ = 8 − 4 = 4;  δ₂ = ½·4 − 3 = −1;  δ₁ = ½·3 − 2 = −½ (the critic's successor is the solver's
    #   next round);  δ₀ = ½·2 − 1 = 0.   A₃ = 4; A₂ = −1 + ¼·4 = 0; A₁ = −½; A₀ = −⅛.
    result = advantages.gae(
        row(0, 0, 0, 8), row(1, 2, 3, 4), torch.ones(1, 4), torch.zeros(1), gamma=0.5, lam=0.5
    )
    assert result.advantage_NT.tolist() == [[-0.125, -0.5, 0.0, 4.0]]


def test_gamma_crosses_turns_and_leaves_completions_alone() -> None:
    # Two turns of two tokens with an observation token between, λ = 1, V = 0, reward 8 on the last token:
    # 8 within its turn, ½·8 in the turn before.
    result = advantages.gae(
        row(0, 0, 0, 0, 8), row(0, 0, 0, 0, 0), torch.tensor([[1, 1, 0, 1, 1]]), torch.zeros(1),
        gamma=row(1, 0.5, 77, 1, 0.5), lam=1.0,
    )  # fmt: skip
    assert result.advantage_NT.tolist() == [[4.0, 4.0, 0.0, 8.0, 8.0]]


def test_a_discount_of_each_step_reaches_the_bootstrap_too() -> None:
    # γ = 0.9 inside the turn and ½ after it, V past the end 10: ½·10 = 5; 0.9·5 = 4.5.
    result = advantages.gae(row(0, 0), row(0, 0), torch.ones(1, 2), tensor(10), gamma=row(0.9, 0.5), lam=1.0)
    torch.testing.assert_close(result.advantage_NT, row(4.5, 5.0))


def test_vtrace_by_hand() -> None:
    # γ = 1, λ = 1, ρ = ½ and 2, rewards 1, 3, values 2, 1, the row ends.
    #   δ₁ = 1·(3 − 1) = 2, v₁ = 1 + 2 = 3;  δ₀ = ½·(1 + 1 − 2) = 0, v₀ = 2 + 0 + ½·2 = 3.
    #   A₁ = 1·(3 − 1) = 2;  A₀ = ½·(1 + 3 − 2) = 1.
    result = advantages.vtrace(
        row(math.log(0.5), math.log(2.0)), row(1, 3), row(2, 1), torch.ones(1, 2), torch.zeros(1), gamma=1.0
    )
    torch.testing.assert_close(result.target_NT, row(3, 3))
    torch.testing.assert_close(result.advantage_NT, row(1, 2))


def test_vtrace_with_lambda_by_hand() -> None:
    # As above with λ = ½: c₀ = ¼, v₀ = 2 + 0 + ¼·2 = 2.5; A₀ = ½·(1 + (½·3 + ½·1) − 2) = ½.
    result = advantages.vtrace(
        row(math.log(0.5), math.log(2.0)), row(1, 3), row(2, 1), torch.ones(1, 2), torch.zeros(1),
        gamma=1.0, lam=0.5,
    )  # fmt: skip
    torch.testing.assert_close(result.target_NT, row(2.5, 3))
    torch.testing.assert_close(result.advantage_NT, row(0.5, 2))


def test_published_vtrace() -> None:
    # rlax, rlax/_src/vtrace_test.py::test_vtrace_td_error_and_advantage, first row.
    ratio = row(0.47515127868303003, 22.312223683220083, 0.038760799635028945, 3.2206988036822364)
    value = row(2.1, 1.1, -3.1, 0.0)
    result = advantages.vtrace(
        ratio.log(), row(-1.3, -1.3, 2.3, 42.0), value, torch.ones(1, 4), tensor(8.4),
        gamma=row(0.0, 0.89, 0.85, 0.99),
    )  # fmt: skip
    td_errors = row(-1.6155143, -3.4973226, 1.8670533, 50.316002)
    torch.testing.assert_close(result.target_NT - value, td_errors, rtol=1e-3, atol=0)
    policy = row(-1.6155143, -3.4973226, 1.8670534, 50.316002)
    torch.testing.assert_close(result.advantage_NT, policy, rtol=1e-3, atol=0)


@given(st.integers(0, 10_000), st.floats(0, 1))
def test_on_policy_vtrace_targets_are_lambda_returns(seed: int, gamma: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    reward, value = torch.randn(2, 2, 5, generator=generator, dtype=F64)
    mask, bootstrap = torch.rand(2, 5, generator=generator) < 0.7, value[:, 0]
    vtrace = advantages.vtrace(
        torch.zeros(2, 5, dtype=F64), reward, value, mask, bootstrap, gamma=gamma, lam=0.8
    )
    gae = advantages.gae(reward, value, mask, bootstrap, gamma=gamma, lam=0.8)
    torch.testing.assert_close(vtrace.target_NT, gae.target_NT)


def test_vtrace_carries_no_gradient_and_never_overflows() -> None:
    log_ratio = row(1000.0, -1000.0).requires_grad_()
    value = row(1, 1).requires_grad_()
    result = advantages.vtrace(
        log_ratio, row(1, 1), value, torch.ones(1, 2), value[:, 0], gamma=0.9, clip_rho=math.inf
    )
    assert not result.target_NT.requires_grad
    assert not result.advantage_NT.requires_grad
    assert result.target_NT.isfinite().all()


def test_importance_weights_are_truncated_and_detached() -> None:
    # Ratios e^0.5 = 1.6487 and e^3 > 2.
    trainer = tensor(-1.0, -1.0, -4.0).requires_grad_()
    weight = advantages.truncated_importance_weight(trainer, tensor(-1.5, -4.0, -1.0))
    assert weight.tolist() == pytest.approx([math.exp(0.5), 2.0, math.exp(-3)])
    assert not weight.requires_grad


def test_outliers_on_both_sides_are_found() -> None:
    inliers = advantages.importance_inliers(
        tensor(0.0, 0.0, 0.0), tensor(math.log(3), 0.1, math.log(0.3)), low=0.5, high=2.0
    )
    assert inliers.tolist() == [False, True, False]


# One episode of a two-player game: turns alternate, rewards 1, 0, 0, 2 (player 0: 1, 0; player 1: 0, 2).
# A second one: 3, 0, 1, 1.
REWARD_B = tensor(1, 0, 0, 2, 3, 0, 1, 1)
PLAYER_B = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
TRAJECTORY_B = torch.tensor([0, 1, 0, 1, 2, 3, 2, 3])


def test_sum_then_normalise_two_players_by_hand() -> None:
    # Player 0: returns 1, 0, 4, 1: mean 1.5, squares 0.25 + 2.25 + 6.25 + 0.25 = 9, std √3.
    # Player 1: returns 2, 2, 1, 1: mean 1.5, std √(1/3).
    result = advantages.sum_then_normalise(REWARD_B, TRAJECTORY_B, PLAYER_B, 2)
    a, b = math.sqrt(3) + 1e-6, math.sqrt(1 / 3) + 1e-6
    expected = tensor(-0.5 / a, 0.5 / b, -1.5 / a, 0.5 / b, 2.5 / a, -0.5 / b, -0.5 / a, -0.5 / b)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)


def test_sum_then_normalise_three_players_are_each_centred() -> None:
    reward = tensor(5, 0, 1, 7, 10, -1)
    player = torch.tensor([0, 1, 2, 0, 1, 2])
    result = advantages.sum_then_normalise(reward, torch.arange(6), player, 3)
    # {5, 7}: ∓1/√2; {0, 10}: ∓5/√50; {1, −1}: ±1/√2.
    expected = tensor(-1, -1, 1, 1, 1, -1) / math.sqrt(2)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def test_normalise_then_sum_by_hand() -> None:
    # Player 0: rewards 1, 0, 3, 1: mean 1.25, deviations −¼, −5/4, 7/4, −¼, squares sum 4.75,
    #   std s = √(4.75/3); sums in units of 1/s: −1.5, −1.25, 1.5, −0.25: mean −0.375.
    # Player 1: rewards 0, 2, 0, 1: mean 0.75, deviations −¾, 5/4, −¾, ¼, squares sum 2.75,
    #   std t = √(2.75/3); sums in units of 1/t: 0.5, 1.25, −0.5, 0.25: mean 0.375.
    result = advantages.normalise_then_sum(REWARD_B, TRAJECTORY_B, PLAYER_B, 2)
    s, t = math.sqrt(4.75 / 3) + 1e-6, math.sqrt(2.75 / 3) + 1e-6
    expected = tensor(
        -1.125 / s, 0.125 / t, -0.875 / s, 0.875 / t, 1.875 / s, -0.875 / t, 0.125 / s, -0.125 / t
    )
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)


def test_normalise_then_sum_counts_equal_sums_once() -> None:
    # Rewards 0, 0, 0, 3 of one player, each its own trajectory: deviations −¾ ×3, 9/4, std 1.5:
    # sums −½, −½, −½, 1.5; distinct −½ and 1.5, mean ½ (the mean over turns would be 0).
    result = advantages.normalise_then_sum(
        tensor(0, 0, 0, 3), torch.arange(4), torch.zeros(4, dtype=torch.int64), 1
    )
    torch.testing.assert_close(result, tensor(-1, -1, -1, 1), atol=1e-5, rtol=0)


def test_normalise_then_sum_bears_a_player_without_turns() -> None:
    player = torch.tensor([0, 0])
    result = advantages.normalise_then_sum(tensor(0, 2), torch.arange(2), player, 3)
    assert result.isfinite().all()
