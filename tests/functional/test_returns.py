"""Facts about returns."""

import math

import pytest
import torch
from torch import Tensor

from kapelle.functional import returns

F64 = torch.float64


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=F64)


def test_return_to_go_by_hand() -> None:
    # γ = ½: 4; 2 + 2 = 4; 1 + 2 = 3.
    result = returns.return_to_go(row(1, 2, 4), torch.ones(1, 3), 0.5)
    assert result.tolist() == [[3.0, 4.0, 4.0]]


def test_masked_steps_take_no_discount_and_no_reward() -> None:
    # The same rewards with an observation token between them and padding after them.
    mask = torch.tensor([[True, False, True, True, False]])
    result = returns.return_to_go(row(1, 99, 2, 4, math.nan), mask, 0.5)
    assert result.tolist() == [[3.0, 0.0, 4.0, 4.0, 0.0]]


def test_discounts_may_differ_by_step() -> None:
    # The step after reward 1 discounts by 0 (an episode's end inside the row): 1; 2 + ½·4 = 4; 4.
    result = returns.return_to_go(row(1, 2, 4), torch.ones(1, 3), row(0.0, 0.5, 0.9))
    assert result.tolist() == [[1.0, 4.0, 4.0]]


def test_turn_returns_discount_over_own_turns() -> None:
    # Two agents in turn, γ = ½: the first's rewards 1, 4, 8, the second's 2, 6.
    reward = torch.tensor([1.0, 2.0, 4.0, 6.0, 8.0], dtype=F64)
    agent = torch.tensor([0, 1, 0, 1, 0])
    # First: 8; 4 + 4 = 8; 1 + 4 = 5. Second: 6; 2 + 3 = 5.
    assert returns.turn_return_to_go(reward, agent, 0.5).tolist() == [5.0, 5.0, 8.0, 6.0, 8.0]


def test_turn_returns_of_a_chain_discount_over_all_turns() -> None:
    # 8; 6 + 4 = 10; 4 + 5 = 9; 2 + 4.5 = 6.5; 1 + 3.25 = 4.25.
    reward = torch.tensor([1.0, 2.0, 4.0, 6.0, 8.0], dtype=F64)
    chain = torch.zeros(5, dtype=torch.int64)
    assert returns.turn_return_to_go(reward, chain, 0.5).tolist() == [4.25, 6.5, 9.0, 10.0, 8.0]


def test_lambda_returns_by_hand() -> None:
    # γ = ½, λ = ½, rewards 1, 2, values of the next states 3, 8 (the last one the bootstrap):
    # G₁ = 2 + ½·8 = 6; G₀ = 1 + ½·(½·3 + ½·6) = 3.25.
    result = returns.lambda_return(
        row(1, 2), row(77, 3), torch.ones(1, 2), torch.tensor([8.0]), gamma=0.5, lam=0.5
    )
    assert result.tolist() == [[3.25, 6.0]]


@pytest.mark.parametrize(
    ("lam", "expected"),
    [
        (0.0, [2.5, 6.0]),  # one step: 1 + ½·3; 2 + ½·8
        (1.0, [4.0, 6.0]),  # Monte Carlo with bootstrap: 1 + ½·(2 + ½·8)
    ],
)
def test_the_ends_of_lambda(lam: float, expected: list[float]) -> None:
    result = returns.lambda_return(
        row(1, 2), row(77, 3), torch.ones(1, 2), torch.tensor([8.0]), gamma=0.5, lam=lam
    )
    assert result.tolist() == [expected]


def test_targets_carry_no_gradient() -> None:
    value = torch.ones(1, 2, requires_grad=True)
    result = returns.lambda_return(row(1, 2), value, torch.ones(1, 2), value[:, 0], gamma=0.5, lam=0.5)
    assert not result.requires_grad
