"""Compute credit from a learned decomposition of the team's return, as VDN and QMIX do.

Actions are selected by the policies; the mixer only evaluates them. A utility Q_i evaluates what agent i read and wrote. A
mixer combines the utilities into Q_tot, which is fitted to the team's return over a replay buffer of episodes. The credit of
a step is computed by the networks *before* they are fitted to the step, because a network that was fitted to an episode can
explain the episode's return by any text in the episode.

Let R be the team's return from the round on. Means are taken over the other episodes of the task. The setting `credit`
selects the form of the credit:

- `difference`: A_i = (R − mean R) − w·(B_i − mean B_i), with B_i = mean_k Q_tot(Q_i ← Q_i^k) over the utilities of the
  agent's turns in the other episodes. B_i is the part of the round's value that is independent of the agent's completion. The
  weight w is R² clipped to [0, 1], where R² is the share of the within-task variance of returns that Q_tot explained in
  earlier steps, measured on episodes before Q_tot was fitted to them. With w = 0, A_i is the team's return minus its mean
  (Dr.GRPO). With w = 1 and Q = R, A_i is Q_tot − mean_k Q_tot(Q_i ← Q_i^k), which is the exact advantage over the agent's
  samples.
- `modelled`: the advantage A_i is Q_tot − Q_tot(Q_i ← mean Q_i), minus its mean. This credit does not contain the noise of
  the return, but contains all errors of Q.
- `utility`: the advantage A_i is Q_i minus its mean (MAVERL).

The expected gradient of `difference` is that of Dr.GRPO, (n − 1)/n·∇J for n episodes of a task, because w, B_i and the means
are independent of the agent's own turn. Agents that acted later in the round have read this turn, so B_i excludes them. The
expected gradient of the other two forms is only as accurate as Q.

The penalties and influence rewards of a turn are added for its agent only. Advantages are not divided by their standard
deviation, because this would increase the noise of an agent without influence to a standard deviation of 1. If a comparison
set has only one member, the member is compared with earlier returns.

During `credit_warmup_steps` and before the first fit (`fit.min_fill` episodes), the advantage is computed from the team's
return from the round on.

Shapes: A agents, B rounds, D width of an embedding, N rounds of one set.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kapelle.algorithm import MIXER_UNDONE, Credit
from kapelle.algorithms.shared.groups import CENTRED, Earlier, Member, compare, place_of
from kapelle.algorithms.shared.monte_carlo import spread
from kapelle.algorithms.value_decomposition.mixer_fit import (
    Fitted,
    Foresight,
    JointEpisode,
    MixerFit,
    Replay,
    Rounds,
    TeamEstimate,
    TeamValue,
    joined,
    read_groups,
    utilities_of,
)
from kapelle.algorithms.value_decomposition.settings import CreditMixer
from kapelle.errors import NumericsError
from kapelle.functional.masking import keep_masked, pack
from kapelle.functional.mixing import difference_credit, explained_by_others, group_mean_utility
from kapelle.functional.returns import return_to_go
from kapelle.rows import Signals, TurnKey, turns_of
from kapelle.team import Team
from kapelle.types import Group


class _StepRounds(NamedTuple):
    """The rounds of one step, and the turns to which their entries belong."""

    batch: Fitted
    keys: Sequence[Mapping[str, TurnKey]]
    """For each round, a mapping from agents to the keys of their turns."""
    set_B: Tensor
    """The number of the comparison set of each round. A set contains the k-th rounds of all episodes of one task."""
    sets: int
    number_B: Sequence[int]
    """The number of each round in its episode."""
    after_BAA: Tensor
    """A mask with 1.0 at [b, i, j] if agent j's turn in round b was sampled after agent i's turn had ended, so that j's turn
    can depend on i's turn."""
    return_B: Tensor
    """The team's return from each round on, as float64."""


class MixedCredit:
    """A `CreditMemory` that computes credit with utilities and a mixer and fits them on a replay buffer."""

    def __init__(
        self, settings: CreditMixer, mixer: Callable[[int, int], nn.Module], team: Team, seed: int
    ) -> None:
        """Create the memory without networks. The networks are built when the width of the embeddings is known."""
        self._settings, self._mixer, self._seed = settings, mixer, seed
        self._agents = tuple(name for name in team.names if team.policy(name).trained)
        self._replay = Replay(settings.fit.capacity)
        self.fit: MixerFit | None = None
        self.foresight = Foresight()
        self._earlier = Earlier()
        self._metrics: dict[str, float] = {}

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return the advantage of each turn, computed by networks that have not seen the step.

        Then add the step to the replay buffer and fit the networks.
        """
        s = self._settings
        joint_episodes = read_groups(groups, signals, self._agents, s.team_reward)
        self._metrics = {}
        if not joint_episodes:
            return {}
        step = self._step(groups, joint_episodes)
        # `value_BA` is compared within a set; `baseline_BA` is then subtracted. Without a fit, and during the warm-up, the value
        # is the team's return from the round on.
        value_BA = step.return_B[:, None].expand(step.batch.rounds.acted_BA.shape)
        baseline_BA, kind = torch.zeros_like(value_BA), "return"  # only values of one kind are compared
        if self.fit is not None:
            fit, weight = self.fit, self.foresight.weight
            with torch.no_grad():
                rounds = fit.placed(step.batch).rounds
                estimate: TeamEstimate = fit.net(rounds)
                total_B = estimate.total_B.double().cpu()
                explained = self.foresight.see(step.return_B, total_B, step.set_B, step.sets)
                self._metrics |= {"q_total": float(estimate.total_B.mean()), "credit_weight": weight}
                self._metrics |= {} if explained is None else {"mixer_explained": explained}
                if signals.step > s.credit_warmup_steps:
                    if s.credit == "difference":
                        baseline_BA = _difference(fit.net, step, rounds, estimate.utility_BA)
                        baseline_BA = weight * baseline_BA.double().cpu()
                    elif s.credit == "modelled":
                        value_BA, kind = (
                            _modelled(fit.net, step, rounds, estimate.utility_BA).cpu(),
                            "utility",
                        )
                    else:
                        value_BA, kind = keep_masked(estimate.utility_BA, rounds.acted_BA).cpu(), "utility"
        advantage = self._compared(value_BA, baseline_BA, kind, step, groups, signals)
        size = dict.fromkeys(self._agents, 0.0)
        for movers in step.keys:
            for agent, key in movers.items():
                size[agent] += abs(advantage[key])
        total = max(sum(size.values()), 1e-12)
        self._metrics |= {f"credit_share/{agent}": own / total for agent, own in size.items()}
        self._learn(list(joint_episodes.values()))
        return s.umad.gain(groups, spread(s, groups, advantage))

    def _step(
        self, groups: Sequence[Group], joint_episodes: Mapping[tuple[int, int], JointEpisode]
    ) -> _StepRounds:
        keys: list[Mapping[str, TurnKey]] = []
        sets: dict[tuple[int, int], int] = {}
        set_of: list[int] = []
        size = len(self._agents)
        rounds = [
            (g, e, k, movers)
            for g, e in joint_episodes
            for k, movers in enumerate(groups[g].episodes[e].rounds(self._agents, trained=True))
        ]
        after_BAA = torch.zeros(len(rounds), size, size)
        for b, (g, e, k, movers) in enumerate(rounds):
            keys.append({agent: TurnKey(g, e, turn.index) for agent, turn in movers.items()})
            set_of.append(sets.setdefault((g, k), len(sets)))
            for i, j in itertools.permutations(movers, 2):
                has_read = movers[j].completed_before > movers[i].index
                after_BAA[b, self._agents.index(i), self._agents.index(j)] = float(has_read)
        batch = joined(list(joint_episodes.values()))
        to_go_NK = return_to_go(batch.reward_NK.double(), batch.mask_NK, self._settings.gamma_turn)
        return_B = pack(to_go_NK, batch.mask_NK)
        return _StepRounds(
            batch, keys, torch.tensor(set_of), len(sets), [k for _, _, k, _ in rounds], after_BAA, return_B
        )

    def _learn(self, joint_episodes: Sequence[JointEpisode]) -> None:
        self._replay.add(joint_episodes)
        if len(self._replay.episodes) >= self._settings.fit.min_fill:
            self.fit = self.fit or self.new_fit(joint_episodes[0].rounds.state_BD.shape[1])
            try:
                self._metrics["mixer_loss"] = self.fit.learn(self._replay)
            except NumericsError:
                self._metrics[MIXER_UNDONE] = 1.0
        self._metrics["replay_fill"] = len(self._replay.episodes) / self._replay.capacity

    def new_fit(self, width: int) -> MixerFit:
        """Return newly initialised networks for states of the given width."""
        agents = len(self._agents)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            net = TeamValue(
                width, utilities_of(self._settings.utility, width, agents), self._mixer(width, agents)
            )
        return MixerFit(self._settings.fit, self._settings.gamma_turn, net, self._seed)

    def _compared(
        self,
        value_BA: Tensor,
        baseline_BA: Tensor,
        kind: str,
        step: _StepRounds,
        groups: Sequence[Group],
        signals: Signals,
    ) -> dict[TurnKey, float]:
        """Return the advantage of every turn: its value, penalties and influence rewards minus the mean of its set and the baseline."""
        penalty = {key: self._settings.forms.of(turn) for key, turn in turns_of(groups)}
        own = self._settings.umad.with_influence(penalty, groups, signals)
        members: list[Member] = []
        baseline: dict[TurnKey, float] = {}
        for b, (value_A, baseline_A) in enumerate(zip(value_BA.tolist(), baseline_BA.tolist(), strict=True)):
            for agent, key in step.keys[b].items():
                i = self._agents.index(agent)
                value = value_A[i] + own[key]
                episode = groups[key.group].episodes[key.episode]
                like = (*place_of(episode, agent), step.number_B[b], kind)
                members.append(Member((int(step.set_B[b]), agent), value, 0, (key,), like))
                baseline[key] = baseline_A[i]
        compared = compare(members, CENTRED, self._earlier)
        return {key: value - baseline[key] for key, value in compared.items()}

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last computed credit."""
        return dict(self._metrics)

    def state(self) -> dict[str, object]:
        """Return the replay buffer, the fitted networks, their measured quality, and the moments of earlier returns."""
        return {
            "replay": self._replay.state(),
            "fit": {} if self.fit is None else self.fit.state(),
            "foresight": self.foresight.state(),
            "earlier": self._earlier.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that a call of `state` returned."""
        self._replay.load_state(state["replay"])
        self.foresight.load_state(state["foresight"])
        self._earlier.load_state(state["earlier"])
        self.fit = None
        if state["fit"]:
            self.fit = self.new_fit(len(state["fit"]["network"]["saw_mean_D"]))
            self.fit.load_state(state["fit"])


def _difference(net: TeamValue, step: _StepRounds, rounds: Rounds, utility_BA: Tensor) -> Tensor:
    """Return B_i − mean B_i of every round and agent as a tensor [B, A]."""
    baseline_BA = torch.zeros_like(utility_BA)
    for s in range(step.sets):
        at_N = (step.set_B == s).nonzero().squeeze(1).to(baseline_BA.device)

        def mix(utility_KA: Tensor, acted_KA: Tensor, row_K: Tensor, at_N: Tensor = at_N) -> Tensor:
            states = rounds._replace(acted_BA=acted_KA, state_BD=rounds.state_BD[at_N[row_K]])
            return net.mix(utility_KA, states)

        baseline_BA[at_N] = explained_by_others(
            mix, utility_BA[at_N], rounds.acted_BA[at_N], step.after_BAA.to(baseline_BA.device)[at_N]
        )
    return baseline_BA


def _modelled(net: TeamValue, step: _StepRounds, rounds: Rounds, utility_BA: Tensor) -> Tensor:
    """Return Q_tot minus Q_tot with Q_i replaced by its mean, for every round and agent, as a tensor [B, A]."""
    baseline_BA = group_mean_utility(utility_BA, rounds.acted_BA, step.set_B.to(utility_BA.device), step.sets)
    return difference_credit(
        lambda replaced_BA: net.mix(replaced_BA, rounds), utility_BA, rounds.acted_BA, baseline_BA
    )
