"""Credit from a learned decomposition of the team's return: what VDN and QMIX share.

Policies act; the mixer only evaluates. A utility Q_i evaluates what each agent read and wrote. A mixer combines the utilities into
Q_tot, which is fitted to the team's return over a replay buffer of episodes. The credit of a step comes from the networks
*before* they are fitted to that step, because a fit that has seen an episode can explain its return by any text in it.

With R the team's return from the round on, and every mean over the other episodes of the task:

- `difference`: A_i = (R − mean R) − w·(B_i − mean B_i), with B_i = mean_k Q_tot(Q_i ← Q_i^k) over the utilities of the agent's turns in
  the other episodes. B_i is the part of the round's value that is independent of the agent's completion. w is clip(R², 0,
  1). R² is the share of the within-task variance of returns that Q_tot explained in earlier steps, on episodes before they
  were fitted. With w = 0 this is the team's return minus its mean (Dr.GRPO). With w = 1 and Q = R it is Q_tot − mean_k
  Q_tot(Q_i ← Q_i^k), the exact advantage over the agent's samples.
- `modelled`: Q_tot − Q_tot(Q_i ← mean Q_i), minus its mean, with weight 1. It is free of the return's noise, but contains
  all errors of Q.
- `utility`: Q_i itself, minus its mean (MAVERL).

The expected gradient of `difference` is that of Dr.GRPO, (n − 1)/n·∇J for n episodes of a task, because w, B_i and the means are
independent of the agent's own turn. Agents that acted later in the round have read that turn, so B_i excludes them. The expected
gradient of the other two forms is only as accurate as Q.

A turn's own penalties and influence rewards are added for its agent alone. Advantages are not divided by their standard deviation,
which would scale the noise of an agent without influence up to 1. A lone member of a set is compared with earlier returns.

During `credit_warmup_steps`, and before the first fit (`fit.min_fill` episodes), the advantage uses the team's return from the round
on.

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
    """One step's rounds, and the turn of each entry."""

    batch: Fitted
    keys: Sequence[Mapping[str, TurnKey]]
    """By round, a mapping from agents to their turns."""
    set_B: Tensor
    """Comparison set of each round: the k-th rounds of one task."""
    sets: int
    number_B: Sequence[int]
    """Number of each round in its episode."""
    after_BAA: Tensor
    """1.0 at [b, i, j] if j's turn was sampled after i's had ended, so that j's turn can depend on i's."""
    return_B: Tensor
    """The team's return from the round on, float64."""


class MixedCredit:
    """Credit from utilities and a mixer, with their replay buffer; a `CreditMemory`."""

    def __init__(
        self, settings: CreditMixer, mixer: Callable[[int, int], nn.Module], team: Team, seed: int
    ) -> None:
        """Take the team; the networks are built when the width of embeddings is known."""
        self._settings, self._mixer, self._seed = settings, mixer, seed
        self._agents = tuple(name for name in team.names if team.policy(name).trained)
        self._replay = Replay(settings.fit.capacity)
        self.fit: MixerFit | None = None
        self.foresight = Foresight()
        self._earlier = Earlier()
        self._metrics: dict[str, float] = {}

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return each turn's advantage by networks that have not seen the step, then store and fit the step."""
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
        """Return a newly initialised mixer for states of this width."""
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
        """Return every turn's value plus its own penalties and influence, minus the mean of its set."""
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
        """Return the metrics of the last call."""
        return dict(self._metrics)

    def state(self) -> dict[str, object]:
        """Return the replay buffer, the fit, its measured quality, and earlier returns."""
        return {
            "replay": self._replay.state(),
            "fit": {} if self.fit is None else self.fit.state(),
            "foresight": self.foresight.state(),
            "earlier": self._earlier.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._replay.load_state(state["replay"])
        self.foresight.load_state(state["foresight"])
        self._earlier.load_state(state["earlier"])
        self.fit = None
        if state["fit"]:
            self.fit = self.new_fit(len(state["fit"]["network"]["saw_mean_D"]))
            self.fit.load_state(state["fit"])


def _difference(net: TeamValue, step: _StepRounds, rounds: Rounds, utility_BA: Tensor) -> Tensor:
    """Return B_i − mean B_i of every round and agent → [B, A]."""
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
    """Return Q_tot − Q_tot(Q_i ← mean Q_i) of every round and agent → [B, A]."""
    baseline_BA = group_mean_utility(utility_BA, rounds.acted_BA, step.set_B.to(utility_BA.device), step.sets)
    return difference_credit(
        lambda replaced_BA: net.mix(replaced_BA, rounds), utility_BA, rounds.acted_BA, baseline_BA
    )
