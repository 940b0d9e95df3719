"""Arms that no recipe should use: algorithms without the very piece that a claim is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, stdev
from typing import Literal

from kapelle.algorithm import Algorithm, Credit, Loss, Outputs, PolicyLoss, Targets
from kapelle.algorithms.c3 import C3, nodes
from kapelle.algorithms.grpo import GRPO
from kapelle.algorithms.marft import MARFT
from kapelle.algorithms.opo import OPO
from kapelle.algorithms.rae import RAE, RunningBaselines
from kapelle.algorithms.shared.groups import Comparison, Earlier, Place, by_agent, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.algorithms.signals.proximal import ProximalLogProbs
from kapelle.functional import divergences, masking
from kapelle.functional.advantages import length_weighted_baseline
from kapelle.rows import Column, Signals, TurnKey, turns_of
from kapelle.runtime.on_demand import torch
from kapelle.types import Episode, Group


class Plain(MonteCarlo):
    """REINFORCE: an agent's return, less the batch's mean or less nothing, in place of GRPO's comparison within a group."""

    name: Literal["experiments.ablations:Plain"] = "experiments.ablations:Plain"
    baseline: Literal["none", "batch"] = "none"

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return A = R, or R less the mean of the agent's returns in the batch."""
        members = by_agent(groups, self.rewards(groups, signals))
        advantage: dict[TurnKey, float] = {}
        agents = {key: turn.agent for key, turn in turns_of(groups)}
        for agent in dict.fromkeys(agents.values()):
            own = [member for member in members if agents[member.keys[0]] == agent]
            mean = fmean(member.value for member in own) if self.baseline == "batch" else 0.0
            advantage |= {key: member.value - mean for member in own for key in member.keys}
        return spread(self, groups, advantage)


class ShortWeighMore(OPO):
    """OPO with attempts weighed the other way round, by 1/length, to tell its reason from that of any other weights."""

    name: Literal["experiments.ablations:ShortWeighMore"] = "experiments.ablations:ShortWeighMore"  # type: ignore[assignment]

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return A = R − Σ (R/len) / Σ (1/len) within an agent's attempts at a task."""
        members = by_agent(groups, self.rewards(groups, signals))
        weight_B = torch.tensor([1.0 / member.tokens for member in members])
        how = Comparison(lambda r_B, g_B, n: length_weighted_baseline(r_B, weight_B, g_B, n))
        return spread(self, groups, compare(members, how, earlier))


ESTIMATORS = {"k1": divergences.kl_k1, "k2": divergences.kl_k2, "k3": divergences.kl_k3}


class Penalty(GRPO):
    """The penalty to the reference and nothing else, by any estimator in either place."""

    name: Literal["experiments.ablations:Penalty"] = "experiments.ablations:Penalty"  # type: ignore[assignment]
    estimator: Literal["k1", "k2", "k3"] = "k1"
    place: Literal["reward", "loss"] = "loss"

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        row = self.row(self.name, self.estimated if self.place == "reward" else self.nothing, reference=True)
        return row if self.place == "reward" else replace(row, policy_loss=self.penalty)

    def estimated(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return −k as every token's advantage."""
        estimate = ESTIMATORS[self.estimator]
        return {
            key: Credit(-estimate(torch.tensor(turn.logprobs), signals.reference[key]))
            for key, turn in turns_of(groups)
        }

    def nothing(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return advantages of 0."""
        return spread(self, groups, {key: 0.0 for key, _ in turns_of(groups)})

    def penalty(self, outputs: Outputs, targets: Targets) -> Loss:
        """Return the mean of k over tokens."""
        k_K = ESTIMATORS[self.estimator](outputs.logp_K, targets[Column.REFERENCE])
        return Loss(*masking.token_mean(k_K, targets.mask_K))


class Uncorrected(GRPO):
    """GRPO that takes every sample for one of the present weights, however old it is: no ratio to those that sampled it."""

    name: Literal["experiments.ablations:Uncorrected"] = "experiments.ablations:Uncorrected"  # type: ignore[assignment]

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        row = super().build()
        return replace(
            row,
            policy_loss=partial(_as_if_fresh, loss=row.policy_loss),
            needs=(*row.needs, ProximalLogProbs()),
        )


class UncorrectedChain(MARFT):
    """MARFT that takes every sample for one of the present weights."""

    name: Literal["experiments.ablations:UncorrectedChain"] = "experiments.ablations:UncorrectedChain"  # type: ignore[assignment]

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        row = super().build()
        return replace(
            row,
            policy_loss=partial(_as_if_fresh, loss=row.policy_loss),
            needs=(*row.needs, ProximalLogProbs()),
        )


def _as_if_fresh(outputs: Outputs, targets: Targets, *, loss: PolicyLoss) -> Loss:
    """Return a loss for which the trainer's weights before the update are those that sampled."""
    columns = {**targets.columns, Column.BEHAVIOUR: targets[Column.PROXIMAL]}
    return loss(outputs, replace(targets, columns=columns))


class Unfinished(GRPO):
    """GRPO that learns nothing from groups that were unfinished when new weights were loaded, as if they were dropped."""

    name: Literal["experiments.ablations:Unfinished"] = "experiments.ablations:Unfinished"  # type: ignore[assignment]

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return GRPO's credit, with weight 0 in groups whose tokens were sampled by several versions."""
        credit = super().credit(groups, signals, earlier)
        versions: dict[int, set[int]] = {}
        for key, turn in turns_of(groups):
            versions.setdefault(key.group, set()).update(version for version, _ in turn.runs)
        return {
            key: given if len(versions[key.group]) == 1 else replace(given, weight=0.0)
            for key, given in credit.items()
        }


class TreeAgainstAll(C3):
    """C3's tree, whose turns are compared with all of the group that was sampled without them, in place of those that read the same."""

    name: Literal["experiments.ablations:TreeAgainstAll"] = "experiments.ablations:TreeAgainstAll"  # type: ignore[assignment]

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return A = mean return of the episodes under a turn, less that of all others, weighed as in C3."""
        better: dict[TurnKey, float] = {}
        under: dict[str, dict[TurnKey, int]] = {}
        for g, group in enumerate(groups):
            paid = [self.returns(episode) for episode in group.episodes]
            for node in nodes(g, group, self.widths, self.returns):
                turn = group.episodes[node.key.episode].turns[node.key.turn]
                own = range(node.key.episode, node.key.episode + node.leaves)
                others = [each[turn.agent] for e, each in enumerate(paid) if e not in own]
                better[node.key] = node.worth - fmean(others)
                under.setdefault(turn.policy, {})[node.key] = node.leaves
        mean = {policy: fmean(leaves.values()) for policy, leaves in under.items()}
        advantage = {
            key: better[key] * leaves / mean[policy]
            for policy, own_leaves in under.items()
            for key, leaves in own_leaves.items()
        }
        return spread(self, groups, advantage)


class OneBaseline(RAE):
    """RAE with one running mean for all roles."""

    name: Literal["experiments.ablations:OneBaseline"] = "experiments.ablations:OneBaseline"  # type: ignore[assignment]

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.row(self.name, memory=lambda team, seed: _OneMean(self))


class _OneMean(RunningBaselines):
    """A running mean of everyone's returns."""

    def place(self, episode: Episode, agent: str) -> Place:
        """Return the only place that there is."""
        return "", "", ""


class Together(MonteCarlo):
    """GRPO over all agents of a task's attempts at once: one mean, one spread, or one of them."""

    name: Literal["experiments.ablations:Together"] = "experiments.ablations:Together"
    one: Literal["mean and spread", "spread"] = "mean and spread"
    """What agents have in common; with `spread` alone each is compared with its own mean."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return A = (R − mean)/(spread + 10⁻⁶)."""
        advantage: dict[TurnKey, float] = {}
        members = by_agent(groups, self.rewards(groups, signals))
        for g in range(len(groups)):
            task = [member for member in members if member.place[0] == g]
            spread_of_all = stdev(member.value for member in task) + 1e-6
            for member in task:
                like = [other.value for other in task if self.one != "spread" or other.place == member.place]
                advantage |= dict.fromkeys(member.keys, (member.value - fmean(like)) / spread_of_all)
        return spread(self, groups, advantage)
