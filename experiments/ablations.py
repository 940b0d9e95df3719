"""Arms that no recipe should use: algorithms without the very piece that a claim is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Literal

from kapelle.algorithm import Algorithm, Credit, Loss, Outputs, PolicyLoss, Targets
from kapelle.algorithms.grpo import GRPO
from kapelle.algorithms.shared.groups import Earlier, by_agent
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.functional import divergences, masking
from kapelle.rows import Column, Signals, TurnKey, turns_of
from kapelle.runtime.on_demand import torch
from kapelle.signals.proximal import ProximalLogProbs
from kapelle.types import Group


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
        agents = [
            groups[member.keys[0].group].episodes[member.keys[0].episode].turns[member.keys[0].turn].agent
            for member in members
        ]
        for agent in dict.fromkeys(agents):
            own = [member for member, its in zip(members, agents, strict=True) if its == agent]
            mean = fmean(member.value for member in own) if self.baseline == "batch" else 0.0
            advantage |= {key: member.value - mean for member in own for key in member.keys}
        return spread(self, groups, advantage)


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


def _as_if_fresh(outputs: Outputs, targets: Targets, *, loss: PolicyLoss) -> Loss:
    """Return a loss for which the trainer's weights before the update are those that sampled."""
    columns = {**targets.columns, Column.BEHAVIOUR: targets[Column.PROXIMAL]}
    return loss(outputs, replace(targets, columns=columns))
