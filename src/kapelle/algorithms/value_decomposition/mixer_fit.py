"""Fit the networks of value decomposition: convert episodes to joint rounds, mix utilities into Q_tot, and fit Q_tot to its targets.

Round k of an episode consists of the k-th trained turns of all agents that have one. These turns are the joint action of
value decomposition. Q_i evaluates what agent i read and wrote in the round, and a mixer combines all Q_i into Q_tot. Q_tot is
fitted over a replay buffer of episodes to one of two targets:

- `monte_carlo`: the sum of discounted rewards from the round on. A truncated episode counts with its rewards so far.
- `td`: r + γ·Q̄_tot, where Q̄_tot evaluates the actions that were taken in the next round (SARSA, without a maximum). λ mixes
  targets over several rounds. The last round of a truncated episode has no next actions, so it is excluded from the fit, and
  the target of the round before it uses Q̄_tot at the last round.

Q̄ is the target network. The target network is initialised as a copy of the utilities and the mixer, and is updated softly or
periodically.

Shapes: A agents, D width of an embedding, H mixing units, K rounds of one episode, N episodes, B rounds of all episodes in
sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kapelle.algorithms.shared.groups import valid_episodes
from kapelle.algorithms.shared.rewards import FREE, PenaltyConfig, TeamReward, round_rewards
from kapelle.algorithms.value_decomposition.settings import FitConfig, Soft, UtilityConfig
from kapelle.errors import NumericsError
from kapelle.functional.masking import keep_masked, masked_mean, pack, segment_mean, unpack
from kapelle.functional.mixing import copied, periodic_update, qmix_mix, soft_update, vdn_mix
from kapelle.functional.returns import lambda_return, return_to_go
from kapelle.models.finite import learned, poisoned
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.randomness import derive_seed
from kapelle.types import Episode, Group, Turn

# -------- Episodes as joint rounds, and the replay buffer
#
# Agents are columns in team order; an agent without a k-th turn is masked.
#
# The state of a round is the mean embedding of what agents read *before* the round: of the prompts that were fixed no later
# than that of its first turn. In a chain, the Actor's prompt contains the Reasoner's turn of the same round. If it were part
# of the state, the mixer could explain the return without the Reasoner, and the Reasoner's credit would vanish.


class Rounds(NamedTuple):
    """Rounds of episodes: joint actions and the states in which they were taken."""

    saw_BAD: Tensor
    said_BAD: Tensor
    acted_BA: Tensor
    """A mask with 1.0 if the agent has a turn in the round and 0 otherwise."""
    state_BD: Tensor


@dataclass(frozen=True, slots=True)
class JointEpisode:
    """One episode in the form that a mixer reads."""

    rounds: Rounds
    """The K rounds of the episode, in order."""
    reward_K: Tensor
    """The team's reward in each round, counted once. The terminal reward is placed on the last round."""
    cut: bool
    """Whether the episode was truncated, so that its future is unknown."""


class Fitted(NamedTuple):
    """A batch of several episodes, with their rounds in sequence."""

    rounds: Rounds
    reward_NK: Tensor
    mask_NK: Tensor
    """A mask with 1.0 at the rounds of each episode. `pack` with this mask maps tensors of shape (N, K) to the rows of
    `rounds`."""
    cut_N: Tensor


def earned_by_round(
    episode: Episode,
    rounds: Sequence[Mapping[str, Turn]],
    how: TeamReward,
    penalties: PenaltyConfig = FREE,
) -> Tensor:
    """Return the team's reward in each round as a float64 tensor [K]. The terminal reward is placed on the last round."""
    reward = round_rewards(episode, how, penalties)
    totals = [sum(reward[turn.index] for turn in movers.values()) for movers in rounds]
    return torch.tensor(totals, dtype=torch.float64)


def read_episode(
    place: tuple[int, int], episode: Episode, signals: Signals, agents: Sequence[str], how: TeamReward
) -> JointEpisode | None:
    """Return the joint rounds of an episode with the embeddings of its turns, or None if the episode has no trained turn."""
    rounds = episode.rounds(agents, trained=True)
    if not rounds:
        return None
    some = signals.embedding[TurnKey(*place, next(iter(rounds[0].values())).index)].observation_D
    saw_KAD = torch.zeros(len(rounds), len(agents), some.shape[0])
    said_KAD, acted_KA = torch.zeros_like(saw_KAD), torch.zeros(saw_KAD.shape[:2])
    state_KD = torch.zeros(len(rounds), some.shape[0])
    for k, movers in enumerate(rounds):
        first = min(turn.index for turn in movers.values())
        before: list[Tensor] = []
        for agent, turn in movers.items():
            seen = signals.embedding[TurnKey(*place, turn.index)]
            i = agents.index(agent)
            saw_KAD[k, i], said_KAD[k, i], acted_KA[k, i] = seen.observation_D, seen.action_D, 1.0
            if turn.completed_before <= first:
                before.append(seen.observation_D)
        state_KD[k] = torch.stack(before).mean(0)
    reward_K = earned_by_round(episode, rounds, how).float()
    return JointEpisode(Rounds(saw_KAD, said_KAD, acted_KA, state_KD), reward_K, episode.truncated)


def read_groups(
    groups: Sequence[Group], signals: Signals, agents: Sequence[str], how: TeamReward
) -> dict[tuple[int, int], JointEpisode]:
    """Return the joint rounds of every valid episode, as a mapping from (group number, episode number) to `JointEpisode`."""
    found = {
        (g, e): read_episode((g, e), episode, signals, agents, how)
        for g, e, episode in valid_episodes(groups)
    }
    return {place: joint for place, joint in found.items() if joint is not None}


def joined(episodes: Sequence[JointEpisode]) -> Fitted:
    """Return one batch of several episodes."""
    pad = torch.nn.utils.rnn.pad_sequence
    reward_NK = pad([episode.reward_K for episode in episodes], batch_first=True)
    mask_NK = pad([torch.ones_like(episode.reward_K) for episode in episodes], batch_first=True)
    columns = zip(*(episode.rounds for episode in episodes), strict=True)
    rounds = Rounds(*(torch.cat(column) for column in columns))
    return Fitted(rounds, reward_NK, mask_NK, torch.tensor([float(episode.cut) for episode in episodes]))


class Replay:
    """A replay buffer with the last `capacity` episodes, oldest first."""

    def __init__(self, capacity: int) -> None:
        """Create an empty buffer for `capacity` episodes."""
        self.capacity = capacity
        self.episodes: list[JointEpisode] = []

    def add(self, episodes: Sequence[JointEpisode]) -> None:
        """Add episodes to the buffer, and drop the oldest episodes if the capacity is exceeded."""
        self.episodes = [*self.episodes, *episodes][-self.capacity :]

    def draw(self, count: int, seed: int) -> Fitted:
        """Return `count` episodes that are drawn uniformly without replacement, or all episodes if there are fewer."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.episodes), generator=generator)[:count]
        return joined([self.episodes[k] for k in order.tolist()])

    def state(self) -> dict[str, object]:
        """Return all episodes as a mapping with a few tensors and lists."""
        if not self.episodes:
            return {}
        batch = joined(self.episodes)
        return {
            **batch.rounds._asdict(),
            "reward_B": torch.cat([episode.reward_K for episode in self.episodes]),
            "rounds": [len(episode.reward_K) for episode in self.episodes],
            "cut": [episode.cut for episode in self.episodes],
        }

    def load_state(self, state: Mapping[str, object]) -> None:
        """Restore the state that a call of `state` returned."""
        self.episodes = []
        if not state:
            return
        counts, cuts = state["rounds"], state["cut"]
        assert isinstance(counts, list)
        assert isinstance(cuts, list)
        columns = []
        for name in (*Rounds._fields, "reward_B"):
            column = state[name]
            assert isinstance(column, Tensor)
            columns.append([piece.clone() for piece in column.split(counts)])
        for *rounds, reward_K, cut in zip(*columns, cuts, strict=True):
            self.episodes.append(JointEpisode(Rounds(*rounds), reward_K, cut))


# -------- The networks: one utility per agent's turn, and mixers
#
# Q_i is a small MLP over the embeddings of what agent i read and wrote; a mixer combines all Q_i into Q_tot. The last layer of
# a utility starts at 0, so that credit starts at 0.
#
# Embeddings of a language model have a common offset and a few coordinates far larger than the rest. They are therefore
# standardised by the mean and standard deviation of the first data of the fit, which then stay fixed.

SMALLEST_SPREAD = 0.1
"""The minimum standard deviation of a coordinate in the standardisation, as a share of the mean standard deviation over
coordinates."""


class TeamEstimate(NamedTuple):
    """The estimated value of each round, and the utility of each agent."""

    utility_BA: Tensor
    total_B: Tensor


class SumMixer(nn.Module):
    """The mixer of VDN, which computes Q_tot = Σ Q_i (arXiv:1706.05296, eq. 2)."""

    def forward(self, utility_BA: Tensor, acted_BA: Tensor, state_BD: Tensor) -> Tensor:
        """Return Q_tot as a tensor [B]. Q_tot is independent of the state."""
        return vdn_mix(utility_BA, acted_BA)


class MonotonicMixer(nn.Module):
    """The mixer of QMIX: a network whose weights are computed from the state by hypernetworks (arXiv:1803.11485, section 4.1).

    Initially, the outputs of the hypernetworks are independent of the state, because only the bias of their last layer is
    random. The effect of the state is learned from this start, so it is not random for unseen states.
    """

    def __init__(self, width: int, agents: int, units: int, hidden: int) -> None:
        """Create the mixer for embeddings of width D, A agents and H mixing units.

        `hidden` is the width of the hidden layers in the hypernetworks.
        """
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
        """Return Q_tot as a tensor [B]."""
        w1_BAH = self.w1(state_BD).unflatten(-1, (self.agents, self.units))
        value_B = self.value(state_BD).squeeze(-1)
        return qmix_mix(utility_BA, acted_BA, w1_BAH, self.b1(state_BD), self.w2(state_BD), value_B)


class OwnUtilities(nn.Module):
    """Utilities with a separate MLP for each agent."""

    def __init__(self, width: int, agents: int, hidden: Sequence[int]) -> None:
        """Create the MLPs for embeddings of width D and A agents. `hidden` contains the widths of the hidden layers."""
        super().__init__()
        self.agents = nn.ModuleList(from_zero(layers(2 * width, hidden, 1)) for _ in range(agents))

    def forward(self, saw_BAD: Tensor, said_BAD: Tensor) -> Tensor:
        """Return the utilities Q_i as a tensor [B, A]."""
        joint_BAX = torch.cat([saw_BAD, said_BAD], dim=-1)
        utilities = [net(joint_BAX[:, i]).squeeze(-1) for i, net in enumerate(self.agents)]
        return torch.stack(utilities, dim=1)


class SharedUtility(nn.Module):
    """Utilities with one MLP for all agents, which receives a learned vector per agent as input."""

    def __init__(self, width: int, agents: int, hidden: Sequence[int], identity: int) -> None:
        """Create the MLP for embeddings of width D and A agents.

        `hidden` contains the widths of hidden layers, and `identity` is the width of an agent's vector.
        """
        super().__init__()
        self.identity = nn.Parameter(torch.randn(agents, identity))
        self.net = from_zero(layers(2 * width + identity, hidden, 1))

    def forward(self, saw_BAD: Tensor, said_BAD: Tensor) -> Tensor:
        """Return the utilities Q_i as a tensor [B, A]."""
        who_BAX = self.identity.expand(saw_BAD.shape[0], -1, -1)
        utility_BA1: Tensor = self.net(torch.cat([saw_BAD, said_BAD, who_BAX], dim=-1))
        return utility_BA1.squeeze(-1)


def utilities_of(settings: UtilityConfig, width: int, agents: int) -> nn.Module:
    """Return the utility networks for embeddings of width `width`."""
    if settings.sharing == "own":
        return OwnUtilities(width, agents, settings.hidden)
    return SharedUtility(width, agents, settings.hidden, settings.identity)


class TeamValue(nn.Module):
    """The utilities and the mixer as one network. The target network is a copy of its weights."""

    saw_mean_D: Tensor
    saw_spread_D: Tensor
    said_mean_D: Tensor
    said_spread_D: Tensor

    def __init__(self, width: int, utilities: nn.Module, mixer: nn.Module) -> None:
        """Create the network from the width of embeddings (D), the utilities and the mixer."""
        super().__init__()
        self.utilities, self.mixer = utilities, mixer
        for what in ("saw", "said"):
            self.register_buffer(f"{what}_mean_D", torch.zeros(width))
            self.register_buffer(f"{what}_spread_D", torch.ones(width))

    @torch.no_grad()
    def standardise_by(self, rounds: Rounds) -> None:
        """Set the mean and standard deviation that standardise embeddings to those of the given rounds."""
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
        """Return the utilities Q_i [B, A] and Q_tot [B]."""
        saw_BAD = (rounds.saw_BAD - self.saw_mean_D) / self.saw_spread_D
        said_BAD = (rounds.said_BAD - self.said_mean_D) / self.said_spread_D
        utility_BA: Tensor = self.utilities(saw_BAD, said_BAD)
        return TeamEstimate(utility_BA, self.mix(utility_BA, rounds))

    def mix(self, utility_BA: Tensor, rounds: Rounds) -> Tensor:
        """Return Q_tot [B] for the given utilities in the states of the given rounds."""
        state_BD = (rounds.state_BD - self.saw_mean_D) / self.saw_spread_D
        total_B: Tensor = self.mixer(utility_BA, rounds.acted_BA, state_BD)
        return total_B


def layers(width: int, hidden: Sequence[int], out: int) -> nn.Sequential:
    """Return an MLP with ReLU activations between its layers."""
    sizes = [width, *hidden, out]
    modules: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        modules += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def from_zero(net: nn.Sequential) -> nn.Sequential:
    """Set the weights and biases of the last layer to 0, and return the network."""
    last = net[-1]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return net


# -------- The fit, and how well it predicts

GRADIENT_NORM = 10.0
"""The norm to which gradients of the fit are clipped, as in the code of QMIX."""

FADING = 0.8
"""The decay per step of the sums from which R² is computed. About the last five steps count."""


class Foresight:
    """Measure the share of the variance of returns that Q_tot explains in episodes to which it was not yet fitted.

    R² = 1 − Σ (R − Q_tot)² / Σ R², where R and Q_tot are relative to their means over the episodes of a task, because only
    differences within a task give credit. Each step is measured before the networks are fitted to it. The sums decay by the
    factor `FADING` per step.
    """

    def __init__(self) -> None:
        """Start with both sums at 0."""
        self._error = self._spread = 0.0

    @property
    def weight(self) -> float:
        """R² over the steps so far, clipped to [0, 1]. The weight is 0 before the first step."""
        return max(0.0, 1.0 - self._error / self._spread) if self._spread > 0 else 0.0

    def see(self, return_B: Tensor, total_B: Tensor, set_B: Tensor, sets: int) -> float | None:
        """Add the returns and predictions of a step. Return R² of this step, or None if the returns do not vary within any task."""
        # Relative to the mean of the set; a set of one gives 0.
        centred_B, predicted_B = (
            x_B - segment_mean(x_B, torch.ones_like(x_B), set_B, sets)[set_B] for x_B in (return_B, total_B)
        )
        error, spread = float((centred_B - predicted_B).square().sum()), float(centred_B.square().sum())
        self._error, self._spread = FADING * self._error + error, FADING * self._spread + spread
        return 1.0 - error / spread if spread > 0 else None

    def state(self) -> dict[str, float]:
        """Return the two sums for the checkpoint."""
        return {"error": self._error, "spread": self._spread}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore the state that a call of `state` returned."""
        self._error, self._spread = state["error"], state["spread"]


class Target(NamedTuple):
    """The targets of Q_tot, and a mask of the rounds that have a target."""

    value_NK: Tensor
    mask_NK: Tensor


class MixerFit:
    """The utilities and the mixer, with their target network and optimiser."""

    def __init__(self, settings: FitConfig, gamma: float, net: TeamValue, seed: int) -> None:
        """Create the optimiser and the target network for a new network. `gamma` is the discount from one round to the next."""
        self.net = net.to(settings.device)
        self.target = copied(self.net.state_dict())
        self.updates = 0
        self._settings, self._gamma, self._seed = settings, gamma, seed
        self._optimizer = torch.optim.Adam(self.net.parameters(), settings.lr)

    def learn(self, replay: Replay) -> float:
        """Update the networks on the replay buffer, as often as the settings define for one step.

        Return the mean squared error of the updates. Raises NumericsError if weights become non-finite, after restoring the
        state before the updates.
        """
        before = deepcopy(self.state())
        if self.updates == 0:
            self.net.standardise_by(self.placed(replay.draw(replay.capacity, self._seed)).rounds)
            self.target = copied(self.net.state_dict())
        losses: list[float] = []
        for _ in range(self._settings.updates):
            batch = replay.draw(self._settings.batch, derive_seed(self._seed, "replay", self.updates))
            losses.append(self._update(self.placed(batch)))
        broken = poisoned(learned({"fit": self.state()}))
        if broken is not None:
            self.load_state(before)
            raise NumericsError(f"The fit of utilities and mixer made its weights non-finite: {broken}.")
        return sum(losses) / len(losses)

    def placed(self, batch: Fitted) -> Fitted:
        """Return the batch on the device of the networks."""
        where = self._settings.device
        rounds = Rounds(*(column.to(where) for column in batch.rounds))
        return Fitted(rounds, *(column.to(where) for column in batch[1:]))

    def _update(self, batch: Fitted) -> float:
        goal = self.goal(batch)
        error_B = self.net(batch.rounds).total_B - pack(goal.value_NK, batch.mask_NK)
        loss = masked_mean(error_B.square(), pack(goal.mask_NK, batch.mask_NK))
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), GRADIENT_NORM)
        self._optimizer.step()
        self.updates += 1
        online, follow = self.net.state_dict(), self._settings.follow
        if isinstance(follow, Soft):
            self.target = soft_update(self.target, online, tau=follow.tau)
        else:
            self.target = periodic_update(self.target, online, step=self.updates, period=follow.every)
        return float(loss.detach())

    @torch.no_grad()
    def goal(self, batch: Fitted) -> Target:
        """Return the target of Q_tot in each round: the sum of discounted rewards from the round on, or r + γ·((1 − λ)·Q̄ + λ·G)."""
        if self._settings.target == "monte_carlo":
            return Target(return_to_go(batch.reward_NK, batch.mask_NK, self._gamma), batch.mask_NK)
        estimate: TeamEstimate = torch.func.functional_call(self.net, self.target, (batch.rounds,))
        value_NK = unpack(estimate.total_B, batch.mask_NK)
        last_N = batch.mask_NK.sum(1, keepdim=True).long() - 1
        bootstrap_N = keep_masked(value_NK.gather(1, last_N).squeeze(1), batch.cut_N)
        places_NK = torch.arange(value_NK.shape[1], device=value_NK.device).expand_as(value_NK)
        unseen_NK = (places_NK == last_N) & batch.cut_N.bool().unsqueeze(1)
        mask_NK = batch.mask_NK.masked_fill(unseen_NK, 0.0)
        value_NK = lambda_return(
            batch.reward_NK, value_NK, mask_NK, bootstrap_N, gamma=self._gamma, lam=self._settings.lam
        )
        return Target(value_NK, mask_NK)

    def state(self) -> dict[str, object]:
        """Return the networks, the target network, the optimiser state, and the number of updates, which seeds the next draw."""
        moments = self._optimizer.state_dict()["state"]
        return {
            "network": copied(self.net.state_dict()),
            "target": copied(self.target),
            "optimizer": {str(k): copied(v) for k, v in moments.items()},
            "updates": self.updates,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that a call of `state` returned."""
        self.net.load_state_dict(state["network"])
        self.target = {name: x.clone().to(self._settings.device) for name, x in state["target"].items()}
        moments = {int(k): {n: x.clone() for n, x in v.items()} for k, v in state["optimizer"].items()}
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.updates = state["updates"]
