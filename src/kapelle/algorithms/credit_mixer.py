"""Credit from a learned decomposition of the team's return: what VDN and QMIX share.

The mixer does not act. Utilities Q_i of what each agent saw and said are mixed into Q_tot, Q_tot is fitted to the
team's return over a replay of episodes, and the utilities then say what each turn is paid:

- `difference`: Q_tot − Q_tot with Q_i replaced by its mean over the episodes of the task, round by round. One scale
  for all agents; 0 for one whose words make no difference.
- `utility`: Q_i itself (MAVERL).

To that come the turn's own penalties and influence, which are no matter of the team. The advantage is this pay less
its mean over the same agent's turns of the same round and task, never divided by their spread, which would blow the
noise of an agent without influence up to size one. A set of one keeps its pay; its difference is 0.

In a step the episodes enter the replay first, then the fit is updated, then credit is given: an episode is judged
by a fit that has seen it. Until `credit_warmup_steps` are over and `fit.min_fill` episodes are remembered, turns are
paid the team's return from their round on.

Shapes: A agents, B rounds, D width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from kapelle.algorithm import Algorithm, Credit, Estimates, TurnKey
from kapelle.algorithms.groups import Member, compare
from kapelle.algorithms.mixer_fit import FitConfig, MixerFit, check_device
from kapelle.algorithms.monte_carlo import MonteCarlo, spread
from kapelle.algorithms.replay import Fitted, Played, Replay, Rounds, joined, read_groups, round_turns
from kapelle.algorithms.utilities import OwnUtilities, SharedUtility, TeamEstimate, TeamValue
from kapelle.configured import Configured
from kapelle.errors import ConfigError
from kapelle.functional.advantages import group_centred
from kapelle.functional.masking import keep_masked, pack
from kapelle.functional.mixing import difference_credit, group_mean_utility
from kapelle.functional.returns import return_to_go
from kapelle.seeds import derive_seed
from kapelle.team import Team
from kapelle.types import Episode, Group


class UtilityConfig(Configured):
    """The network behind Q_i."""

    sharing: Literal["own", "shared"] = "own"
    """One network per agent, or one for all that is told whose turn it judges."""
    hidden: tuple[int, ...] = (64,)
    """Widths of its hidden layers."""
    identity: int = Field(8, ge=1)
    """Width of an agent's learned vector, with `sharing: shared`."""

    def build(self, width: int, agents: int) -> nn.Module:
        """Return the networks for embeddings of a width."""
        if self.sharing == "own":
            return OwnUtilities(width, agents, self.hidden)
        return SharedUtility(width, agents, self.hidden, self.identity)


class CreditMixer(MonteCarlo):
    """What VDN and QMIX can be told; each adds its name and its mixer."""

    gamma_turn: float = Field(1.0, ge=0.0, le=1.0)
    """Discount from one round to the next."""
    credit: Literal["difference", "utility"] = "difference"
    credit_warmup_steps: int = Field(5, ge=0)
    """Steps in which turns are paid the team's return, while the mixer learns already."""
    utility: UtilityConfig = UtilityConfig()
    fit: FitConfig = FitConfig()

    @model_validator(mode="after")
    def _one_return_for_all(self) -> CreditMixer:
        if self.team_reward == "individual":
            raise ValueError(
                "`team_reward: individual` leaves no team's return to decompose; set `mean`, `sum`, `max`, `min` or "
                "`last`, or `algorithm.name: ippo`"
            )
        if self.fit.min_fill > self.fit.capacity:
            raise ValueError("`fit.min_fill` is more than `fit.capacity` can hold; raise the capacity")
        return self


def mixer_row(settings: CreditMixer, name: str, mixer: Callable[[int, int], nn.Module]) -> Algorithm:
    """Return the row; `mixer` makes, of D and A, what mixes utilities."""

    def memory(team: Team, seed: int) -> MixedCredit:
        return MixedCredit(settings, mixer, team, derive_seed(seed, "mixer"))

    checks = (
        partial(check_one_base, algorithm=name),
        partial(check_device, device=settings.fit.device),
    )
    return settings.row(name, None, checks, memory=memory, embeddings=True)


def check_one_base(team: Team, algorithm: str) -> None:
    """Raise ConfigError when the trained agents stand on different models: their vectors do not compare."""
    of = {team.policies[policy].base: policy for policy in team.trained}
    if len(of) > 1:
        (one, first), (other, second) = list(of.items())[:2]
        raise ConfigError(
            f"`{algorithm}` reads all agents' turns as vectors of one model, but '{first}' stands on "
            f"'{team.bases[one]}' and '{second}' on '{team.bases[other]}'. Set one model for all trained agents, or "
            "`algorithm.name: ippo`."
        )


class _Step(NamedTuple):
    """One step's rounds, and whose turn each entry is."""

    batch: Fitted
    keys: Sequence[Mapping[str, TurnKey]]
    """By round: agent → its turn."""
    sets: Sequence[tuple[int, int]]
    """By round: (group, round)."""


class MixedCredit:
    """Credit by utilities and mixer, with the replay they are fitted on."""

    def __init__(
        self, settings: CreditMixer, mixer: Callable[[int, int], nn.Module], team: Team, seed: int
    ) -> None:
        """Take the team whose trained agents are credited; networks are made when their input is known."""
        self._settings, self._mixer, self._seed = settings, mixer, seed
        self._agents = tuple(name for name in team.names if team.policy(name).trained)
        self._pays = settings.umad.paid(self._penalties)
        self._value = _CREDITS[settings.credit]
        self._replay = Replay(settings.fit.capacity)
        self._fit: MixerFit | None = None
        self._metrics: dict[str, float] = {}

    def __call__(self, groups: Sequence[Group], estimates: Estimates) -> Mapping[TurnKey, Credit]:
        """Remember the step's episodes, fit, and return each turn's advantage."""
        s = self._settings
        played = read_groups(groups, estimates, self._agents, s.team_reward)
        self._metrics = {}
        if not played:
            return {}
        self._replay.add(list(played.values()))
        step = self._step(groups, played)
        ready = len(self._replay.episodes) >= s.fit.min_fill
        if ready:
            self._learn(step)
        if ready and estimates.step > s.credit_warmup_steps:
            pay_BA = self._decomposed(step)
        else:
            pay_BA = self._returns(step)
        self._measure(pay_BA, step)
        members = self._members(pay_BA, step, groups, estimates)
        return s.umad.gain(groups, spread(s, groups, compare(members, group_centred)))

    def _step(self, groups: Sequence[Group], played: Mapping[tuple[int, int], Played]) -> _Step:
        keys: list[Mapping[str, TurnKey]] = []
        sets: list[tuple[int, int]] = []
        for g, e in played:
            for k, movers in enumerate(round_turns(groups[g].episodes[e], self._agents)):
                keys.append({agent: TurnKey(g, e, turn.index) for agent, turn in movers.items()})
                sets.append((g, k))
        return _Step(joined(list(played.values())), keys, sets)

    def _learn(self, step: _Step) -> None:
        fit = self._fit = self._fit or self._fresh(step.batch.rounds.state_BD.shape[1])
        if fit.updates:
            self._metrics["mixer_explained"] = _explained(fit, step.batch)
        self._metrics["mixer_loss"] = fit.learn(self._replay)

    def _fresh(self, width: int) -> MixerFit:
        agents = len(self._agents)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            net = TeamValue(width, self._settings.utility.build(width, agents), self._mixer(width, agents))
        return MixerFit(self._settings.fit, self._settings.gamma_turn, net, self._seed)

    @torch.no_grad()
    def _decomposed(self, step: _Step) -> Tensor:
        """What the mixer pays each turn → [B, A]."""
        assert self._fit is not None
        net, rounds = self._fit.net, self._fit.placed(step.batch).rounds
        estimate: TeamEstimate = net(rounds)
        self._metrics["q_total"] = float(estimate.total_B.mean())
        number: dict[tuple[int, int], int] = {}
        set_B = torch.tensor([number.setdefault(place, len(number)) for place in step.sets])
        return self._value(net, rounds, estimate, set_B.to(rounds.acted_BA.device), len(number)).cpu()

    def _returns(self, step: _Step) -> Tensor:
        """The team's return from each round on, for everybody → [B, A]."""
        batch = step.batch
        to_go_NK = return_to_go(batch.reward_NK.double(), batch.mask_NK, self._settings.gamma_turn)
        return pack(to_go_NK, batch.mask_NK)[:, None].expand(-1, len(self._agents))

    def _members(
        self, pay_BA: Tensor, step: _Step, groups: Sequence[Group], estimates: Estimates
    ) -> list[Member]:
        """Every turn with its pay, its own penalties and influence included, in the set it is compared in."""
        own: dict[tuple[int, int], Mapping[int, float]] = {}
        members: list[Member] = []
        for pay_A, keys, (g, k) in zip(pay_BA.tolist(), step.keys, step.sets, strict=True):
            for agent, key in keys.items():
                place = (g, key.episode)
                if place not in own:
                    own[place] = self._pays(place, groups[g].episodes[key.episode], estimates)
                pay = pay_A[self._agents.index(agent)] + own[place][key.turn]
                members.append(Member((g, k, agent), pay, 0, (key,)))
        return members

    def _penalties(
        self, place: tuple[int, int], episode: Episode, estimates: Estimates
    ) -> Mapping[int, float]:
        forms = self._settings.forms
        return {turn.index: forms.of(turn) for turn in episode.turns if turn.trained}

    def _measure(self, pay_BA: Tensor, step: _Step) -> None:
        size_A = keep_masked(pay_BA.abs(), step.batch.rounds.acted_BA).sum(0)
        for agent, size in zip(self._agents, size_A.tolist(), strict=True):
            self._metrics[f"credit_share/{agent}"] = size / max(float(size_A.sum()), 1e-12)
        self._metrics["replay_fill"] = len(self._replay.episodes) / self._replay.capacity

    def metrics(self) -> Mapping[str, float]:
        """Return what is to be shown of the last call."""
        return dict(self._metrics)

    def state(self) -> dict[str, object]:
        """Return the replay and all that is learned."""
        fit = {} if self._fit is None else self._fit.state()
        return {"replay": self._replay.state(), "fit": fit}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned."""
        self._replay.load_state(state["replay"])
        self._fit = None
        if state["fit"]:
            self._fit = self._fresh(len(state["fit"]["network"]["saw_mean_D"]))
            self._fit.load_state(state["fit"])


@torch.no_grad()
def _explained(fit: MixerFit, batch: Fitted) -> float:
    """Share of the targets' variance that Q_tot explains in rounds it was not fitted on yet; 0 without variance."""
    placed = fit.placed(batch)
    goal = fit.goal(placed)
    on_B = pack(goal.mask_NK, placed.mask_NK).bool()
    goal_B = pack(goal.value_NK, placed.mask_NK)[on_B]
    error_B = goal_B - fit.net(placed.rounds).total_B[on_B]
    spread_B = goal_B - goal_B.mean()
    total = float(spread_B.square().sum())
    return 1.0 - float(error_B.square().sum()) / total if total > 0 else 0.0


def _difference(net: TeamValue, rounds: Rounds, estimate: TeamEstimate, set_B: Tensor, sets: int) -> Tensor:
    baseline_BA = group_mean_utility(estimate.utility_BA, rounds.acted_BA, set_B, sets)
    return difference_credit(
        lambda utility_BA: net.mix(utility_BA, rounds), estimate.utility_BA, rounds.acted_BA, baseline_BA
    )


def _utility(net: TeamValue, rounds: Rounds, estimate: TeamEstimate, set_B: Tensor, sets: int) -> Tensor:
    return keep_masked(estimate.utility_BA, rounds.acted_BA)


_CREDITS: Mapping[str, Callable[[TeamValue, Rounds, TeamEstimate, Tensor, int], Tensor]] = {
    "difference": _difference,
    "utility": _utility,
}
