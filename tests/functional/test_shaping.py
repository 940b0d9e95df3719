"""Facts about shaping: penalties, MAPoRL's returns and flips, UMAD's influence and confidence."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kapelle.functional import shaping

F64 = torch.float64


def test_overlong_penalty_by_hand() -> None:
    # Limit 20, buffer 4: free up to 16, −¼ per token, −1 at 20 and beyond (DAPO, eq. 13).
    length = torch.tensor([0, 16, 17, 19, 20, 500])
    assert shaping.overlong_penalty(length, limit=20, buffer=4).tolist() == [0, 0, -0.25, -0.75, -1, -1]


def test_kl_in_the_reward_by_hand() -> None:
    # β = ½: −½·(−1 + 2) = −½ and −½·(−3 + 1) = 1.
    logp = torch.tensor([-1.0, -3.0], requires_grad=True)
    penalty = shaping.kl_in_reward(logp, torch.tensor([-2.0, -1.0]), beta=0.5)
    assert penalty.tolist() == [-0.5, 1.0]
    assert not penalty.requires_grad


# Verifier scores of 2 agents over 3 turns.
SCORE_TA = torch.tensor([[0.2, 0.6], [0.4, 0.8], [1.0, 0.5]], dtype=F64)


def shared(score_TA: torch.Tensor) -> torch.Tensor:
    """Every agent gets the mean score of all agents at the turn."""
    return score_TA.mean(dim=-1, keepdim=True).expand(score_TA.shape)


def test_maporl_return_shared_by_hand() -> None:
    # γ = ½; means of the turns 0.4, 0.6, 0.75.
    #   t = 0: (v + ½·0.6 + ¼·0.75) / 1.75 = (v + 0.4875)/1.75
    #   t = 1: (v + ½·0.75) / 1.5 = (v + 0.375)/1.5;   t = 2: v.
    result = shaping.maporl_discounted_sum(SCORE_TA, shared(SCORE_TA), gamma=0.5)
    expected = torch.tensor(
        [[0.6875 / 1.75, 1.0875 / 1.75], [0.775 / 1.5, 1.175 / 1.5], [1.0, 0.5]], dtype=F64
    )
    torch.testing.assert_close(result, expected)


def test_maporl_return_individual_by_hand() -> None:
    # Agent 0: (0.2 + 0.2 + 0.25)/1.75, (0.4 + 0.5)/1.5, 1. Agent 1: (0.6 + 0.4 + 0.125)/1.75, 1.05/1.5, 0.5.
    result = shaping.maporl_discounted_sum(SCORE_TA, SCORE_TA, gamma=0.5)
    expected = torch.tensor([[0.65 / 1.75, 1.125 / 1.75], [0.6, 0.7], [1.0, 0.5]], dtype=F64)
    torch.testing.assert_close(result, expected)


@given(st.integers(0, 10_000), st.floats(0, 1), st.integers(1, 4), st.integers(1, 4))
def test_maporl_returns_stay_in_the_range_of_scores(seed: int, gamma: float, turns: int, agents: int) -> None:
    score = torch.rand(turns, agents, generator=torch.Generator().manual_seed(seed), dtype=F64)
    for future in (score, shared(score)):
        result = shaping.maporl_discounted_sum(score, future, gamma=gamma)
        assert result.min() >= score.min() - 1e-12
        assert result.max() <= score.max() + 1e-12


# α0…α3 are powers of ten, so that the digits of a bonus name the terms in it.
ALPHA = (1.0, 10.0, 100.0, 1000.0)
# own before, other before, own after, other after → bonus on the first turn, bonus on the second.
FLIPS = [
    # Both wrong before.
    ((0, 0, 0, 0), (0, 0)),
    ((0, 0, 0, 1), (1000, 0)),  # the other found the truth although I was wrong
    ((0, 0, 1, 0), (0, 10)),  # I found it by myself
    ((0, 0, 1, 1), (1000, 10)),
    # I wrong, the other right.
    ((0, 1, 0, 0), (-100, 0)),  # I misled it
    ((0, 1, 0, 1), (0, 0)),
    ((0, 1, 1, 0), (-100, 1)),  # I let myself be corrected, and misled it
    ((0, 1, 1, 1), (0, 1)),
    # I right, the other wrong.
    ((1, 0, 0, 0), (0, -1)),  # I let myself be misled
    ((1, 0, 0, 1), (100, -1)),
    ((1, 0, 1, 0), (0, 0)),
    ((1, 0, 1, 1), (100, 0)),  # I convinced it
    # Both right.
    ((1, 1, 0, 0), (-1000, -10)),
    ((1, 1, 0, 1), (0, -10)),  # I lost the truth although the other had it
    ((1, 1, 1, 0), (-1000, 0)),  # it lost the truth although I had it
    ((1, 1, 1, 1), (0, 0)),
]


@pytest.mark.parametrize(("flip", "bonus"), FLIPS)
def test_all_sixteen_flips(flip: tuple[int, int, int, int], bonus: tuple[float, float]) -> None:
    correct = torch.tensor(flip, dtype=torch.bool).view(2, 2)
    result = shaping.maporl_influence(correct, alpha=ALPHA)
    assert tuple(result[:, 0].tolist()) == bonus


def test_helping_others_is_rewarded_and_misleading_them_is_penalised() -> None:
    for flip, (first, _) in FLIPS:
        other_before, other_after = flip[1], flip[3]
        assert math.copysign(1, first) * (first != 0) == other_after - other_before


def test_a_middle_turn_has_both_terms_and_a_batch_is_as_each_alone() -> None:
    # Agent 0: ✗, ✓, ✓; agent 1: ✗, ✗, ✓. Turn 1: α1 (found it alone) and α2 (convinced the other).
    debate = torch.tensor([[0, 0], [1, 0], [1, 1]], dtype=torch.bool)
    alone = shaping.maporl_influence(debate, alpha=ALPHA)
    assert alone[:, 0].tolist() == [0, 110, 0]
    batch = shaping.maporl_influence(torch.stack([debate, ~debate]), alpha=ALPHA)
    assert batch[0].tolist() == alone.tolist()


def test_umad_influence_by_hand() -> None:
    # Three agents, rewards of two turns: changes +1, 0, −1. Others' mean change: −½, 0, +½.
    reward = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    assert shaping.umad_influence(reward, eta=0.2).tolist() == [
        pytest.approx([-0.2, 0.0, 0.2]),
        [0.0, 0.0, 0.0],
    ]


def test_influence_of_a_single_agent_raises_an_error() -> None:
    for function in (
        lambda: shaping.maporl_influence(torch.ones(2, 1), alpha=ALPHA),
        lambda: shaping.umad_influence(torch.ones(2, 1), eta=1.0),
        lambda: shaping.relative_confidence_gain(torch.ones(2, 1), torch.ones(2, 1), alpha=1.0),
    ):
        with pytest.raises(AssertionError, match="another agent"):
            function()


def test_confidence_gain_by_hand() -> None:
    # NLL 1 and 3: z = ∓1/√2 (ddof 1); α = ½: A·e^{±0.35355}.
    advantage = torch.tensor([2.0, -1.0], dtype=F64)
    nll = torch.tensor([1.0, 3.0], dtype=F64)
    group = torch.zeros(2, dtype=torch.int64)
    result = shaping.confidence_gain(advantage, nll, group, 1, alpha=0.5)
    factor = math.exp(0.5 / math.sqrt(2))
    assert result.tolist() == pytest.approx([2 * factor, -1 / factor])


def test_relative_confidence_by_hand() -> None:
    # NLL 1, 2, 3: against the others' means 2.5, 2, 1.5 that is −1.5, 0, 1.5.
    result = shaping.relative_confidence_gain(
        torch.ones(1, 3, dtype=F64), torch.tensor([[1.0, 2.0, 3.0]]), alpha=1.0
    )
    assert result[0].tolist() == pytest.approx([math.exp(1.5), 1.0, math.exp(-1.5)])


@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(2, 4))
def test_no_term_depends_on_the_order_of_agents(seed: int, turns: int, agents: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(turns, agents, generator=generator, dtype=F64).round(decimals=1)
    order = torch.randperm(agents, generator=generator)
    means = shared(score)
    for there, shuffled in (
        (
            shaping.maporl_influence(score > 0.5, alpha=ALPHA),
            shaping.maporl_influence(score[:, order] > 0.5, alpha=ALPHA),
        ),
        (
            shaping.maporl_discounted_sum(score, means, gamma=0.9),
            shaping.maporl_discounted_sum(score[:, order], means[:, order], gamma=0.9),
        ),
    ):
        torch.testing.assert_close(shuffled, there[:, order])
