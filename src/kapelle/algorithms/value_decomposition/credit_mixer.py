"""Credit from a learned decomposition of the team's return: what VDN and QMIX share.

Policies act; the mixer only judges. Utilities Q_i of what each agent read and wrote are mixed into Q_tot, which is fitted to the
team's return over a replay of episodes. A step is credited by the networks as they were *before* they saw it, and
then fitted: a fit that has seen an episode explains its return by whatever text was in it. With R the team's return
from the round on, and every mean over the other episodes of the task:

- `difference`: A_i = (R − mean R) − w·(B_i − mean B_i), B_i = mean_k Q_tot(Q_i ← Q_i^k) over what the agent's turns of the other
  episodes were worth: the value of the round whatever the agent says. w = clip(R², 0, 1), R² the share of the variance of
  returns within tasks that Q_tot explained in episodes that it was not fitted on, over the steps before this one. With w = 0
  this is the team's return less its mean (Dr.GRPO); with w = 1 and Q = R it is Q_tot − mean_k Q_tot(Q_i ← Q_i^k), the exact
  advantage over an agent's samples.
- `modelled`: Q_tot − Q_tot(Q_i ← mean Q_i) however much Q explains, less its mean. No noise of the return, all errors of Q.
- `utility`: Q_i itself, less its mean (MAVERL).

The expected gradient of `difference` is that of Dr.GRPO, (n − 1)/n·∇J for n episodes of a task: w, B_i and the means are
independent of the agent's own turn. An agent that acted later in the round
has read it and is left out of B_i. The gradient of the other two is as good as Q.

The turn's own penalties and influence are added, for its agent alone. Advantages are not divided by their
spread, which would scale the noise of an agent without influence up to size one. A set of one is compared with earlier pay.

Until `credit_warmup_steps` are over and a fit exists (`fit.min_fill` episodes remembered), turns are paid the team's
return from their round on.

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
    """By round: agent → its turn."""
    set_B: Tensor
    """Rounds of one number are compared: the k-th ones of one task."""
    sets: int
    number_B: Sequence[int]
    """Which round of its episode each is."""
    after_BAA: Tensor
    """1.0 at [b, i, j] if j's turn was sampled after i's was over: it may be an effect of it."""
    return_B: Tensor
    """The team's return from the round on, float64."""


class MixedCredit:
    """Credit by utilities and mixer, with the replay they are fitted on."""

    def __init__(
        self, settings: CreditMixer, mixer: Callable[[int, int], nn.Module], team: Team, seed: int
    ) -> None:
        """Take the team whose trained agents are credited; networks are made when their input is known."""
        self._settings, self._mixer, self._seed = settings, mixer, seed
        self._agents = tuple(name for name in team.names if team.policy(name).trained)
        self._replay = Replay(settings.fit.capacity)
        self._fit: MixerFit | None = None
        self._foresight = Foresight()
        self._earlier = Earlier()
        self._metrics: dict[str, float] = {}

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return each turn's advantage by networks that have not seen the step, then remember and fit it."""
        s = self._settings
        played = read_groups(groups, signals, self._agents, s.team_reward)
        self._metrics = {}
        if not played:
            return {}
        step = self._step(groups, played)
        # What is compared within a set, and what is subtracted from the result. Without a fit, and during the warm-up, every
        # turn is paid the team's return from its round on.
        value_BA = step.return_B[:, None].expand(step.batch.rounds.acted_BA.shape)
        less_BA, of = torch.zeros_like(value_BA), "return"  # values of one kind alone are compared
        if self._fit is not None:
            fit, weight = self._fit, self._foresight.weight
            with torch.no_grad():
                rounds = fit.placed(step.batch).rounds
                estimate: TeamEstimate = fit.net(rounds)
                total_B = estimate.total_B.double().cpu()
                explained = self._foresight.see(step.return_B, total_B, step.set_B, step.sets)
                self._metrics |= {"q_total": float(estimate.total_B.mean()), "credit_weight": weight}
                self._metrics |= {} if explained is None else {"mixer_explained": explained}
                if signals.step > s.credit_warmup_steps:
                    if s.credit == "difference":
                        less_BA = _difference(fit.net, step, rounds, estimate.utility_BA)
                        less_BA = weight * less_BA.double().cpu()
                    elif s.credit == "modelled":
                        value_BA, of = _modelled(fit.net, step, rounds, estimate.utility_BA).cpu(), "utility"
                    else:
                        value_BA, of = keep_masked(estimate.utility_BA, rounds.acted_BA).cpu(), "utility"
                    if of == "utility":
                        less_BA = torch.zeros_like(value_BA)
        advantage = self._compared(value_BA, less_BA, of, step, groups, signals)
        size = dict.fromkeys(self._agents, 0.0)
        for movers in step.keys:
            for agent, key in movers.items():
                size[agent] += abs(advantage[key])
        total = max(sum(size.values()), 1e-12)
        self._metrics |= {f"credit_share/{agent}": own / total for agent, own in size.items()}
        self._learn(list(played.values()))
        return s.umad.gain(groups, spread(s, groups, advantage))

    def _step(self, groups: Sequence[Group], played: Mapping[tuple[int, int], JointEpisode]) -> _StepRounds:
        keys: list[Mapping[str, TurnKey]] = []
        places: dict[tuple[int, int], int] = {}
        of: list[int] = []
        size = len(self._agents)
        rounds = [
            (g, e, k, movers)
            for g, e in played
            for k, movers in enumerate(groups[g].episodes[e].rounds(self._agents, trained=True))
        ]
        after_BAA = torch.zeros(len(rounds), size, size)
        for b, (g, e, k, movers) in enumerate(rounds):
            keys.append({agent: TurnKey(g, e, turn.index) for agent, turn in movers.items()})
            of.append(places.setdefault((g, k), len(places)))
            for i, j in itertools.permutations(movers, 2):
                has_read = movers[j].seen > movers[i].index
                after_BAA[b, self._agents.index(i), self._agents.index(j)] = float(has_read)
        batch = joined(list(played.values()))
        to_go_NK = return_to_go(batch.reward_NK.double(), batch.mask_NK, self._settings.gamma_turn)
        return_B = pack(to_go_NK, batch.mask_NK)
        return _StepRounds(
            batch, keys, torch.tensor(of), len(places), [k for _, _, k, _ in rounds], after_BAA, return_B
        )

    def _learn(self, played: Sequence[JointEpisode]) -> None:
        self._replay.add(played)
        if len(self._replay.episodes) >= self._settings.fit.min_fill:
            self._fit = self._fit or self._fresh(played[0].rounds.state_BD.shape[1])
            try:
                self._metrics["mixer_loss"] = self._fit.learn(self._replay)
            except NumericsError:
                self._metrics[MIXER_UNDONE] = 1.0
        self._metrics["replay_fill"] = len(self._replay.episodes) / self._replay.capacity

    def _fresh(self, width: int) -> MixerFit:
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
        less_BA: Tensor,
        of: str,
        step: _StepRounds,
        groups: Sequence[Group],
        signals: Signals,
    ) -> dict[TurnKey, float]:
        """Return every turn's pay, its own penalties and influence included, above the mean of its set."""
        forms, umad = self._settings.forms, self._settings.umad
        own: Mapping[TurnKey, float] = {key: forms.of(turn) for key, turn in turns_of(groups)}
        if umad.influence:
            own = umad.with_influence(own, groups, signals)
        members: list[Member] = []
        less: dict[TurnKey, float] = {}
        for b, (value_A, less_A) in enumerate(zip(value_BA.tolist(), less_BA.tolist(), strict=True)):
            for agent, key in step.keys[b].items():
                i = self._agents.index(agent)
                value = value_A[i] + own[key]
                episode = groups[key.group].episodes[key.episode]
                like = (*place_of(episode, agent), step.number_B[b], of)
                members.append(Member((int(step.set_B[b]), agent), value, 0, (key,), like))
                less[key] = less_A[i]
        compared = compare(members, CENTRED, self._earlier)
        return {key: value - less[key] for key, value in compared.items()}

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last call."""
        return dict(self._metrics)

    def state(self) -> dict[str, object]:
        """Return the replay, everything learned, and the measured worth of it."""
        fit = {} if self._fit is None else self._fit.state()
        earlier = self._earlier.state()
        return {
            "replay": self._replay.state(),
            "fit": fit,
            "foresight": self._foresight.state(),
            "earlier": earlier,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._replay.load_state(state["replay"])
        self._foresight.load_state(state["foresight"])
        self._earlier.load_state(state["earlier"])
        self._fit = None
        if state["fit"]:
            self._fit = self._fresh(len(state["fit"]["network"]["saw_mean_D"]))
            self._fit.load_state(state["fit"])


def _difference(net: TeamValue, step: _StepRounds, rounds: Rounds, utility_BA: Tensor) -> Tensor:
    """Return B_i − mean B_i of every round and agent → [B, A]."""
    less_BA = torch.zeros_like(utility_BA)
    for s in range(step.sets):
        at_N = (step.set_B == s).nonzero().squeeze(1).to(less_BA.device)

        def mix(utility_KA: Tensor, acted_KA: Tensor, row_K: Tensor, at_N: Tensor = at_N) -> Tensor:
            states = rounds._replace(acted_BA=acted_KA, state_BD=rounds.state_BD[at_N[row_K]])
            return net.mix(utility_KA, states)

        less_BA[at_N] = explained_by_others(
            mix, utility_BA[at_N], rounds.acted_BA[at_N], step.after_BAA.to(less_BA.device)[at_N]
        )
    return less_BA


def _modelled(net: TeamValue, step: _StepRounds, rounds: Rounds, utility_BA: Tensor) -> Tensor:
    """Return Q_tot − Q_tot(Q_i ← mean Q_i) of every round and agent → [B, A]."""
    baseline_BA = group_mean_utility(utility_BA, rounds.acted_BA, step.set_B.to(utility_BA.device), step.sets)
    return difference_credit(
        lambda replaced_BA: net.mix(replaced_BA, rounds), utility_BA, rounds.acted_BA, baseline_BA
    )
