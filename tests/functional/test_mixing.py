"""Facts about mixing: monotonicity, what VDN can and cannot fit, credit, target networks."""

import math

import pytest
import torch
from torch import Tensor

from kapelle.functional import mixing

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_vdn_sums_those_who_acted() -> None:
    utility = torch.tensor([[1.0, 2.0, math.nan], [1.0, 2.0, 4.0]])
    acted = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert mixing.vdn_mix(utility, acted).tolist() == [3.0, 7.0]


def test_qmix_by_hand() -> None:
    # Q = (1, 2), W1 = ((1, −1), (−2, 0)), b1 = (0, −2), W2 = (3, −1), V = 10.
    # |W1|ᵀQ + b1 = (1 + 4, 1 + 0 − 2) = (5, −1); ELU: 5, e⁻¹ − 1; Q_tot = 15 + (e⁻¹ − 1) + 10.
    total = mixing.qmix_mix(
        torch.tensor([[1.0, 2.0]], dtype=F64),
        torch.ones(1, 2),
        torch.tensor([[[1.0, -1.0], [-2.0, 0.0]]], dtype=F64),
        torch.tensor([[0.0, -2.0]], dtype=F64),
        torch.tensor([[3.0, -1.0]], dtype=F64),
        torch.tensor([10.0], dtype=F64),
    )
    assert total.item() == pytest.approx(24.0 + math.exp(-1), abs=1e-12)


def test_the_gradient_of_qmix_in_each_utility_is_not_negative() -> None:
    utility = normal(50, 3).requires_grad_()
    total = mixing.qmix_mix(
        utility,
        torch.ones(50, 3),
        normal(50, 3, 8, seed=1),
        normal(50, 8, seed=2),
        normal(50, 8, seed=3),
        normal(50, seed=4),
    )
    (grad,) = torch.autograd.grad(total.sum(), utility)
    assert (grad >= 0).all()
    assert (grad > 0).any()


def test_mixes_pass_the_numerical_gradient_check() -> None:
    inputs = tuple(
        normal(*shape, seed=i).requires_grad_()
        for i, shape in enumerate([(2, 3), (2, 3, 4), (2, 4), (2, 4), (2,)])
    )
    acted = torch.tensor([[1, 1, 0], [1, 1, 1]])

    def mix(utility: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, value: Tensor) -> Tensor:
        return mixing.qmix_mix(utility, acted, w1, b1, w2, value) + mixing.vdn_mix(utility, acted)

    assert torch.autograd.gradcheck(mix, inputs)


# The two-step game of the QMIX paper (arXiv 1803.11485, §5): rows and columns are the agents' actions.
GAME_B = torch.tensor([[0.0, 1.0], [1.0, 8.0]], dtype=F64)


def test_qmix_represents_both_second_steps_exactly() -> None:
    # Utilities 0 and 1 for the two actions. One unit, W1 = (−w, w), b1 = −w, W2 = 7/w, V = 1, where
    # w = 7(1 − e^−w) = 6.99361…: utilities that sum to 0, 1, 2 give ELU = e^−w − 1 = −w/7, 0, w, and
    # Q_tot = 7/w·ELU + 1 = 0, 1, 8. The other step, 7 everywhere, is W2 = 0, V = 7.
    w = 7.0
    for _ in range(30):
        w = 7 * (1 - math.exp(-w))
    utility = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], dtype=F64)
    ones = torch.ones(4, 1, dtype=F64)
    w1 = torch.tensor([[-w], [w]], dtype=F64).expand(4, 2, 1)
    total = mixing.qmix_mix(utility, torch.ones(4, 2), w1, -w * ones, 7 / w * ones, ones[:, 0])
    torch.testing.assert_close(total.view(2, 2), GAME_B, atol=1e-12, rtol=0)
    sevens = mixing.qmix_mix(utility, torch.ones(4, 2), w1, -w * ones, 0 * ones, 7 * ones[:, 0])
    assert sevens.tolist() == [7.0] * 4


def least_squares_vdn(game: Tensor) -> Tensor:
    """Fit Q_1(a) + Q_2(b) to the game through `vdn_mix` by gradient descent on all four cells."""
    utility = torch.zeros(2, 2, dtype=F64, requires_grad=True)
    optimiser = torch.optim.LBFGS([utility], max_iter=100, tolerance_grad=1e-12, tolerance_change=1e-14)

    def table() -> Tensor:
        cells = [torch.stack([utility[0, a], utility[1, b]]) for a in (0, 1) for b in (0, 1)]
        return mixing.vdn_mix(torch.stack(cells), torch.ones(4, 2)).view(2, 2)

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = (table() - game).square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    return table().detach()


def test_vdn_s_least_squares_fit_of_the_two_step_game() -> None:
    # Published in QMIX's paper for {0, 1; 1, 8}: {−1.5, 2.5; 2.5, 6.5}; {7, 7; 7, 7} is fitted exactly.
    expected = torch.tensor([[-1.5, 2.5], [2.5, 6.5]], dtype=F64)
    torch.testing.assert_close(least_squares_vdn(GAME_B), expected, atol=1e-6, rtol=0)
    sevens = torch.full((2, 2), 7.0, dtype=F64)
    torch.testing.assert_close(least_squares_vdn(sevens), sevens, atol=1e-6, rtol=0)


def test_group_means_are_over_the_rows_in_which_the_agent_acted() -> None:
    utility = torch.tensor([[1.0, 5.0], [3.0, math.nan], [10.0, 2.0]])
    acted = torch.tensor([[1, 1], [1, 0], [1, 1]])
    mean = mixing.group_mean_utility(utility, acted, torch.tensor([0, 0, 1]), 2)
    assert mean.tolist() == [[2.0, 5.0], [2.0, 5.0], [10.0, 2.0]]


def test_difference_credit_of_a_sum_is_the_utility_above_its_mean() -> None:
    utility = torch.tensor([[1.0, 5.0], [3.0, 5.0]], dtype=F64, requires_grad=True)
    acted = torch.ones(2, 2)
    baseline = mixing.group_mean_utility(utility, acted, torch.tensor([0, 0]), 1)
    credit = mixing.difference_credit(lambda q: mixing.vdn_mix(q, acted), utility, acted, baseline)
    # Means 2 and 5: the second agent makes no difference and gets exactly 0.
    assert credit.tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    assert not credit.requires_grad


def test_difference_credit_replaces_one_agent_at_a_time() -> None:
    # Q_tot = Q_1·Q_2 with baselines 1 and 1: 2·3 − 1·3 = 3 and 2·3 − 2·1 = 4.
    utility, ones = torch.tensor([[2.0, 3.0]]), torch.ones(1, 2)
    credit = mixing.difference_credit(lambda q: q.prod(dim=1), utility, ones, ones)
    assert credit.tolist() == [[3.0, 4.0]]


def test_agents_without_a_turn_have_no_credit() -> None:
    utility, acted = torch.tensor([[2.0, 3.0]]), torch.tensor([[1, 0]])
    # Even if the mix itself forgot who acted.
    credit = mixing.difference_credit(lambda q: q.sum(dim=1), utility, acted, torch.zeros(1, 2))
    assert credit.tolist() == [[2.0, 0.0]]


def test_what_others_explain_is_a_mean_of_the_mix() -> None:
    """Two agents and four rows, paid by their minimum. Of the first agent, in the first row: its other utilities are 0, 1 and 1, so that
    the rows are worth 1/3·(0 + ½ + ½), 1/3·(0 + 1 + 1), 0 and 1/3·(0 + 1 + 1) with the partner's ½, 1, 0 and 1: 1/3 less their mean of 5/12."""
    utility_NA = torch.tensor([[0.0, 0.5], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    everybody_NA, nobody_NAA = torch.ones(4, 2), torch.zeros(4, 2, 2)

    def least(utility_KA: Tensor, acted_KA: Tensor, row_K: Tensor) -> Tensor:
        return utility_KA.masked_fill(acted_KA == 0, 1.0).amin(1)

    found_NA = mixing.explained_by_others(least, utility_NA, everybody_NA, nobody_NAA)
    torch.testing.assert_close(found_NA[0, 0], torch.tensor(1 / 3 - 5 / 12))
    # In the third row, which was 1, its others are 0, 0 and 1: the partner's 0 is worth 0, and the mean is 1/3·(½ + 1 + 0 + 1)/4.
    torch.testing.assert_close(found_NA[2, 0], torch.tensor(-2.5 / 12))
    # A partner that has read the turn is omitted, and then all rows are worth the same.
    after_NAA = nobody_NAA.clone()
    after_NAA[:, 0, 1] = 1.0
    found_NA = mixing.explained_by_others(least, utility_NA, everybody_NA, after_NAA)
    torch.testing.assert_close(found_NA[:, 0], torch.zeros(4, dtype=found_NA.dtype))


def test_what_others_explain_of_a_sum_is_their_part_of_it() -> None:
    utility_NA = torch.tensor([[3.0, 0.5, 1.0], [0.0, 1.0, 2.0], [1.0, 0.0, 0.0]])
    acted_NA = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    found_NA = mixing.explained_by_others(
        lambda utility_KA, acted_KA, row_K: mixing.vdn_mix(utility_KA, acted_KA),
        utility_NA,
        acted_NA,
        torch.zeros(3, 3, 3),
    )
    # The first agent acted in two rows, in which its partners earned 1.5 and 3.
    torch.testing.assert_close(found_NA[:, 0], torch.tensor([-0.75, 0.75, 0.0]))


def test_a_target_starts_as_a_copy_and_is_none_of_the_online_network_s_memory() -> None:
    online = {"w": torch.ones(2, requires_grad=True)}
    target = mixing.copied(online)
    with torch.no_grad():
        online["w"].add_(1.0)
    assert target["w"].tolist() == [1.0, 1.0]
    assert not target["w"].requires_grad


def test_soft_update_by_hand() -> None:
    # τ = ¼: ¾·4 + ¼·8 = 5; the step counter is copied.
    target = {"w": torch.tensor([4.0]), "steps": torch.tensor(3)}
    online = {"w": torch.tensor([8.0], requires_grad=True), "steps": torch.tensor(9)}
    updated = mixing.soft_update(target, online, tau=0.25)
    assert updated["w"].item() == 5.0
    assert updated["steps"].item() == 9
    assert not updated["w"].requires_grad
    assert target["w"].item() == 4.0


def test_periodic_update_copies_at_multiples_of_its_period() -> None:
    target, online = {"w": torch.tensor([4.0])}, {"w": torch.tensor([8.0])}
    found = [
        mixing.periodic_update(target, online, step=step, period=3)["w"].item() for step in (1, 2, 3, 4, 6)
    ]
    assert found == [4.0, 4.0, 8.0, 4.0, 8.0]
