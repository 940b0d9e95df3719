"""The networks of value decomposition: a utility of each agent's turn, and what mixes them.

Q_i is a small MLP over what agent i read and wrote, both as vectors; a mixer combines all of them to Q_tot. The last
layer of a utility starts at 0, so that before anything is learned no agent has credit.

Embeddings of a language model have a few coordinates far larger than the rest and a common offset. They are
therefore standardised by the mean and spread of the first data that the network is fitted on, and by the same ones
ever after.

Shapes: B rounds, A agents, D width of an embedding, H mixing units.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kapelle.algorithms.value_decomposition.replay import Rounds
from kapelle.functional.mixing import qmix_mix, vdn_mix

SMALLEST_SPREAD = 0.1
"""Least spread of a coordinate, as a share of the mean spread: less is not scaled up to one."""


class TeamEstimate(NamedTuple):
    """The value of a round, and each agent's utility."""

    utility_BA: Tensor
    total_B: Tensor


class Mixer(Protocol):
    """Combines utilities to Q_tot, which never falls when one of them rises."""

    def __call__(self, utility_BA: Tensor, acted_BA: Tensor, state_BD: Tensor) -> Tensor:
        """Return Q_tot [B]; the utility of an agent that did not act is no part of it."""
        ...


class SumMixer(nn.Module):
    """VDN: Q_tot = Σ Q_i (1706.05296 eq. 2)."""

    def forward(self, utility_BA: Tensor, acted_BA: Tensor, state_BD: Tensor) -> Tensor:
        """Return Q_tot [B]; the state is not read."""
        return vdn_mix(utility_BA, acted_BA)


class MonotonicMixer(nn.Module):
    """QMIX: a mixing network whose weights hypernetworks compute from the state (1803.11485 §4.1).

    The hypernetworks start as constants (only the bias of their last layer is drawn): the effect of the state on the mix
    is learned, and does not depend on chance for states never seen before.
    """

    def __init__(self, width: int, agents: int, units: int, hidden: int) -> None:
        """Take D, A, H and the width of the hypernetworks' hidden layer."""
        super().__init__()
        self.agents, self.units = agents, units
        self.w1 = layers(width, (hidden,), agents * units)
        self.b1 = nn.Linear(width, units)
        self.w2 = layers(width, (hidden,), units)
        self.value = layers(width, (units,), 1)
        for last in (self.w1[-1], self.b1, self.w2[-1], self.value[-1]):
            assert isinstance(last, nn.Linear)
            nn.init.constant_(last.weight, 0.0)

    def forward(self, utility_BA: Tensor, acted_BA: Tensor, state_BD: Tensor) -> Tensor:
        """Return Q_tot [B]."""
        w1_BAH = self.w1(state_BD).unflatten(-1, (self.agents, self.units))
        value_B = self.value(state_BD).squeeze(-1)
        return qmix_mix(utility_BA, acted_BA, w1_BAH, self.b1(state_BD), self.w2(state_BD), value_B)


class OwnUtilities(nn.Module):
    """One MLP per agent."""

    def __init__(self, width: int, agents: int, hidden: Sequence[int]) -> None:
        """Take D, A and the widths of hidden layers."""
        super().__init__()
        self.agents = nn.ModuleList(from_zero(layers(2 * width, hidden, 1)) for _ in range(agents))

    def forward(self, saw_BAD: Tensor, said_BAD: Tensor) -> Tensor:
        """Return Q_i [B, A]."""
        joint_BAX = torch.cat([saw_BAD, said_BAD], dim=-1)
        utilities = [net(joint_BAX[:, i]).squeeze(-1) for i, net in enumerate(self.agents)]
        return torch.stack(utilities, dim=1)


class SharedUtility(nn.Module):
    """One MLP for all agents, with a learned vector for the agent whose turn it judges."""

    def __init__(self, width: int, agents: int, hidden: Sequence[int], identity: int) -> None:
        """Take D, A, the widths of hidden layers and of an agent's vector."""
        super().__init__()
        self.identity = nn.Parameter(torch.randn(agents, identity))
        self.net = from_zero(layers(2 * width + identity, hidden, 1))

    def forward(self, saw_BAD: Tensor, said_BAD: Tensor) -> Tensor:
        """Return Q_i [B, A]."""
        who_BAX = self.identity.expand(saw_BAD.shape[0], -1, -1)
        utility_BA1: Tensor = self.net(torch.cat([saw_BAD, said_BAD, who_BAX], dim=-1))
        return utility_BA1.squeeze(-1)


class TeamValue(nn.Module):
    """Utilities and mixer together; a target network is a copy of this."""

    saw_mean_D: Tensor
    saw_spread_D: Tensor
    said_mean_D: Tensor
    said_spread_D: Tensor

    def __init__(self, width: int, utilities: nn.Module, mixer: nn.Module) -> None:
        """Take D and the two parts."""
        super().__init__()
        self.utilities, self.mixer = utilities, mixer
        for what in ("saw", "said"):
            self.register_buffer(f"{what}_mean_D", torch.zeros(width))
            self.register_buffer(f"{what}_spread_D", torch.ones(width))

    @torch.no_grad()
    def standardise_by(self, rounds: Rounds) -> None:
        """Set mean and spread of embeddings from these rounds."""
        acted_BA = rounds.acted_BA.bool()
        for x_BAD, mean_D, spread_D in (
            (rounds.saw_BAD, self.saw_mean_D, self.saw_spread_D),
            (rounds.said_BAD, self.said_mean_D, self.said_spread_D),
        ):
            x_KD = x_BAD[acted_BA]
            own_D = x_KD.std(0, correction=0)
            least = SMALLEST_SPREAD * own_D.mean()
            mean_D.copy_(x_KD.mean(0))
            spread_D.copy_(torch.where(own_D.mean() > 0, own_D.clamp(min=least), torch.ones_like(own_D)))

    def forward(self, rounds: Rounds) -> TeamEstimate:
        """Return Q_i [B, A] and Q_tot [B]."""
        saw_BAD = (rounds.saw_BAD - self.saw_mean_D) / self.saw_spread_D
        said_BAD = (rounds.said_BAD - self.said_mean_D) / self.said_spread_D
        utility_BA: Tensor = self.utilities(saw_BAD, said_BAD)
        return TeamEstimate(utility_BA, self.mix(utility_BA, rounds))

    def mix(self, utility_BA: Tensor, rounds: Rounds) -> Tensor:
        """Return Q_tot [B] of other utilities in the same states."""
        state_BD = (rounds.state_BD - self.saw_mean_D) / self.saw_spread_D
        total_B: Tensor = self.mixer(utility_BA, rounds.acted_BA, state_BD)
        return total_B


def layers(width: int, hidden: Sequence[int], out: int) -> nn.Sequential:
    """Return an MLP with ReLU between its layers."""
    sizes = [width, *hidden, out]
    modules: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        modules += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def from_zero(net: nn.Sequential) -> nn.Sequential:
    """Return the net with its last layer at 0."""
    last = net[-1]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return net
