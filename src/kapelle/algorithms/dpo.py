"""DPO for teams: each agent's turns in the better episode against its turns in the worse one.

Direct preference optimisation (2305.18290, eq. 7): −log σ(β·Δ), Δ = log π/π_ref of the chosen side minus that of
the rejected side, log-probs summed over the side's tokens. `label_smoothing` is the probability that a label is
wrong. `kind: ipo` is (Δ − 1/(2β))² (2310.12036, eq. 17), with log-probs averaged over the side's tokens.

Pairs. From rollouts: the episodes of a task with the highest and the lowest return make one pair *for each agent*,
and a side is all turns of the agent in its episode, summed. A task whose episodes earned the
same makes none. From recorded preferences (`data: recorded` on environment `preferences`): the recorded pair.

Deviations from the papers: with rollouts the pairs come from the current policy, again at every step (online
DPO); prompts of an agent's later turns differ between the sides, since their histories differ; IPO's average over
tokens is not in its paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm, Credit, Data, Loss, Outputs, PolicyLoss, Targets, Update
from kapelle.algorithms.shared.rewards import TeamReward, agent_returns
from kapelle.algorithms.shared.surrogate import ones_like_turn
from kapelle.functional import preferences
from kapelle.functional.masking import segment_mean, segment_sum
from kapelle.rows import Column, Signals, TurnKey, turns_of
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.settings.base import Settings
from kapelle.signals.reference import ReferenceLogProbs, refreshed
from kapelle.types import Group


class DPO(Settings):
    """Settings of direct preference optimisation."""

    name: Literal["dpo"] = "dpo"
    data: Literal["rollout", "recorded"] = "rollout"
    """`rollout`: the team plays and its episodes are compared. `recorded`: recorded pairs of the environment, or
    the answers of its script."""
    kind: Literal["dpo", "ipo"] = "dpo"
    """`dpo` (2305.18290) or `ipo` (2310.12036)."""
    beta: float = Field(default=0.1, gt=0.0)
    """How strongly the policy is kept close to its reference."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Probability that a pair is the wrong way round."""
    group_size: int = Field(default=2, ge=1)
    """Episodes per task, of which the best and the worst are compared."""
    team_reward: TeamReward = "mean"
    reference_every: int = Field(default=0, ge=0)
    """Steps between refreshes of the reference policy; 0 never refreshes it."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the samples of a step."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps into which each pass is divided."""

    @model_validator(mode="after")
    def _makes_pairs(self) -> DPO:
        if self.group_size < 2:
            raise ValueError(
                "a group of one has no pair to compare; set `algorithm.group_size: 2` or more, or take recorded pairs "
                "with `algorithm.data: recorded`, `algorithm.group_size: 2` and `environment.name: preferences`"
            )
        if self.kind == "ipo" and self.label_smoothing:
            raise ValueError("`label_smoothing` goes with `kind: dpo`; IPO has none")
        return self

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return Algorithm(
            name=self.name,
            policy_loss=self._loss(),
            credit=self.credit,
            data=Data("rollout" if self.data == "rollout" else "demonstrations", self.group_size),
            needs=(ReferenceLogProbs(),),
            update=Update(self.epochs, self.minibatches),
            returns=partial(agent_returns, how=self.team_reward),
            after_update=refreshed(self.reference_every),
            lacks="no pairs, as every attempt at a task earned the same",
        )

    def _loss(self) -> PolicyLoss:
        if self.kind == "ipo":
            return partial(ipo_over_pairs, beta=self.beta)
        return partial(dpo_over_pairs, beta=self.beta, label_smoothing=self.label_smoothing)

    def credit(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return +1 for turns of a pair's chosen side, −1 for those of its rejected side; others weigh nothing."""
        sides: dict[tuple[int, int, str], tuple[int, float]] = {}
        pairs = 0
        for g, group in enumerate(groups):
            for agent, (best, worst) in pairs_of(group, self.team_reward).items():
                sides[g, best, agent], sides[g, worst, agent] = (pairs, 1.0), (pairs, -1.0)
                pairs += 1
        credit: dict[TurnKey, Credit] = {}
        for key, turn in turns_of(groups):
            pair, side = sides.get((key.group, key.episode, turn.agent), (None, 0.0))
            given = ones_like_turn(len(turn.completion_ids), side)
            credit[key] = Credit(given, weight=abs(side), pair=pair)
        return credit


def pairs_of(group: Group, how: TeamReward) -> dict[str, tuple[int, int]]:
    """Return, by agent, the indices of its best and its worst episode; the first of ties.

    An agent that is not trained, or that earned the same in all episodes, is absent.
    """
    earned: dict[str, dict[int, float]] = {}
    for e, episode in enumerate(group.episodes):
        if episode.error is None:
            returns = agent_returns(episode, how)
            for agent in {turn.agent: None for turn in episode.turns if turn.trained}:
                earned.setdefault(agent, {})[e] = returns[agent]
    pairs: dict[str, tuple[int, int]] = {}
    for agent, by_episode in earned.items():
        best, worst = max(by_episode, key=by_episode.__getitem__), min(by_episode, key=by_episode.__getitem__)
        if by_episode[best] > by_episode[worst]:
            pairs[agent] = best, worst
    return pairs


def dpo_over_pairs(outputs: Outputs, targets: Targets, *, beta: float, label_smoothing: float) -> Loss:
    """Return the sum of `preferences.dpo_loss` over the batch's pairs, and how many they are."""
    sides = _Sides(targets)
    return sides.loss(
        preferences.dpo_loss(*sides.summed(outputs), beta=beta, label_smoothing=label_smoothing), outputs
    )


def ipo_over_pairs(outputs: Outputs, targets: Targets, *, beta: float) -> Loss:
    """Return the sum of `preferences.ipo_loss` over the batch's pairs, and how many they are."""
    sides = _Sides(targets)
    return sides.loss(preferences.ipo_loss(*sides.averaged(outputs), beta=beta), outputs)


_Reduce = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class _Sides:
    """Which tokens of a batch are the chosen and the rejected side of which pair. N pairs, K tokens."""

    def __init__(self, targets: Targets) -> None:
        assert targets.pair_S is not None, "pairs are compared"
        numbers_N, pair_S = torch.unique(targets.pair_S, return_inverse=True)
        self._pair_K = pair_S[targets.segment_K]
        self._pairs = len(numbers_N)
        self._reference_K = targets[Column.REFERENCE]
        self._chosen_K = (targets[Column.ADVANTAGE] > 0) & targets.mask_K.bool()
        self._rejected_K = (targets[Column.ADVANTAGE] < 0) & targets.mask_K.bool()
        for side_K in (self._chosen_K, self._rejected_K):
            held = len(torch.unique(self._pair_K[side_K]))
            assert held == self._pairs, "both sides of a pair are in one batch"

    def summed(self, outputs: Outputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log-probs [N] of chosen and rejected sides, then the reference's, summed over their tokens."""
        return self._four(outputs, segment_sum)

    def averaged(self, outputs: Outputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same as `summed`, averaged over the tokens."""
        return self._four(outputs, segment_mean)

    def _four(self, outputs: Outputs, reduce: _Reduce) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        policy_K, reference_K = outputs.logp_K, self._reference_K
        return (
            reduce(policy_K, self._chosen_K, self._pair_K, self._pairs),
            reduce(policy_K, self._rejected_K, self._pair_K, self._pairs),
            reduce(reference_K, self._chosen_K, self._pair_K, self._pairs),
            reduce(reference_K, self._rejected_K, self._pair_K, self._pairs),
        )

    def loss(self, pairs: preferences.PreferenceLoss, outputs: Outputs) -> Loss:
        """Return the sum over pairs, with metrics."""
        weight = pairs.margin_N.new_tensor(float(self._pairs))
        chosen, rejected, _, _ = self.averaged(outputs)
        return Loss(
            pairs.loss_N.sum(),
            weight,
            {
                "preference_accuracy": ((pairs.margin_N > 0).to(weight.dtype).sum(), weight),
                "preference_margin": (pairs.margin_N.sum(), weight),
                "chosen_logp": (chosen.detach().sum(), weight),
                "rejected_logp": (rejected.detach().sum(), weight),
            },
        )
