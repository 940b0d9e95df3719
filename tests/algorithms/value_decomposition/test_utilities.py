"""The networks of value decomposition: monotone for any weights, zero at the start, independent of absent agents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kapelle.algorithms.value_decomposition.mixer_fit import (
    MonotonicMixer,
    OwnUtilities,
    Rounds,
    SharedUtility,
    SumMixer,
    TeamValue,
)

F64 = torch.float64


def drawn(rounds: int, agents: int, width: int, seed: int) -> Rounds:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    saw, said = normal(rounds, agents, width), normal(rounds, agents, width)
    return Rounds(saw, said, torch.ones(rounds, agents, dtype=F64), normal(rounds, width))


def qmix(agents: int, width: int, seed: int, size: float = 1.0) -> TeamValue:
    """A network of which every weight is drawn, signs included."""
    torch.manual_seed(seed)
    net = TeamValue(width, OwnUtilities(width, agents, (8,)), MonotonicMixer(width, agents, 4, 8)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0.0, size)
    return net


class TestMonotonicity:
    @given(st.integers(0, 10_000), st.integers(1, 4), st.floats(0.001, 10.0), st.floats(0.1, 3.0))
    @settings(max_examples=60, deadline=None)
    def test_q_total_never_falls_when_a_utility_rises(
        self, seed: int, agents: int, rise: float, size: float
    ) -> None:
        net, rounds = qmix(agents, 5, seed, size), drawn(6, agents, 5, seed + 1)
        utility, total = net(rounds)
        for agent in range(agents):
            raised = utility.clone()
            raised[:, agent] += rise
            assert (net.mix(raised, rounds) >= total - 1e-9 * total.abs()).all()


@pytest.mark.parametrize("mixer", [SumMixer(), MonotonicMixer(3, 2, 4, 8)])
@pytest.mark.parametrize("utilities", [OwnUtilities(3, 2, (8,)), SharedUtility(3, 2, (8, 8), 4)])
class TestTeamValue:
    def test_at_the_start_every_utility_is_0(self, utilities: nn.Module, mixer: nn.Module) -> None:
        assert TeamValue(3, utilities, mixer).double()(drawn(4, 2, 3, 0)).utility_BA.abs().max() == 0

    def test_agents_without_a_turn_are_excluded_from_the_total(
        self, utilities: nn.Module, mixer: nn.Module
    ) -> None:
        net, rounds = TeamValue(3, utilities, mixer).double(), drawn(4, 2, 3, 0)
        acted = rounds.acted_BA.clone()
        acted[:, 1] = 0.0
        some = torch.randn(4, 2, dtype=F64)
        other = torch.stack([some[:, 0], some[:, 1] + 100], dim=1)
        absent = rounds._replace(acted_BA=acted)
        assert torch.equal(net.mix(some, absent), net.mix(other, absent))
        assert not torch.equal(net.mix(some, rounds), net.mix(other, rounds))

    def test_gradients_reach_every_weight(self, utilities: nn.Module, mixer: nn.Module) -> None:
        net = TeamValue(3, utilities, mixer).double()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.normal_()
        net(drawn(64, 2, 3, 0)).total_B.square().sum().backward()
        dead = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
        assert dead == []


class TestUtilities:
    def test_a_utility_reads_its_own_agent_s_turn_only(self) -> None:
        torch.manual_seed(0)
        for net in (OwnUtilities(3, 2, (8,)), SharedUtility(3, 2, (8,), 4)):
            for parameter in net.parameters():
                nn.init.normal_(parameter)
            saw, said = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
            before = net(saw, said)
            said[:, 1] += 1.0
            after = net(saw, said)
            assert torch.equal(before[:, 0], after[:, 0])
            assert not torch.equal(before[:, 1], after[:, 1])


class TestStandardisation:
    def test_by_hand(self) -> None:
        # Saw: coordinates 0, 2 (mean 1, spread 1) and 5, 5 (no spread: floored at a tenth of the mean spread ½).
        saw = torch.tensor([[[0.0, 5.0]], [[2.0, 5.0]]])
        rounds = Rounds(saw, torch.zeros(2, 1, 2), torch.ones(2, 1), saw[:, 0])
        net = TeamValue(2, OwnUtilities(2, 1, ()), SumMixer())
        net.standardise_by(rounds)
        assert net.saw_mean_D.tolist() == [1.0, 5.0]
        assert net.saw_spread_D.tolist() == pytest.approx([1.0, 0.05])
        assert net.said_spread_D.tolist() == [1.0, 1.0], "nothing varies: nothing is blown up"

    def test_an_offset_and_a_scale_of_the_embeddings_change_nothing(self) -> None:
        rounds = drawn(20, 2, 3, 0)
        moved = rounds._replace(
            saw_BAD=rounds.saw_BAD * 50 + 7,
            said_BAD=rounds.said_BAD * 9 - 2,
            state_BD=rounds.state_BD * 50 + 7,
        )
        net = qmix(2, 3, 0)
        net.standardise_by(rounds)
        plain = net(rounds).total_B
        net.standardise_by(moved)
        torch.testing.assert_close(net(moved).total_B, plain)
