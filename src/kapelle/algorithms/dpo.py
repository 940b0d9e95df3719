"""DPO for teams: each agent's turns in the better episode are preferred to its turns in the worse one.

Direct preference optimisation (2305.18290, eq. 7) minimises

    −log σ(β·Δ),    Δ = log π/π_ref of the chosen side − log π/π_ref of the rejected side

with log-probs summed over a side's tokens. `label_smoothing` is the probability that a label is wrong. `kind: ipo` is
(Δ − 1/(2β))² (2310.12036, eq. 17), with log-probs averaged over a side's tokens. Both losses depend only on a difference, so
both sides can become less likely. `nll` = α adds −α·log π of the chosen side per token (iterative reasoning preference
optimisation, 2404.19733, eq. 1).

Pairs. From rollouts, the episodes of a task with the highest and the lowest return make one pair *for each agent*. A side is
the sum over all turns of the agent in its episode. A task whose episodes have equal returns gives no pair. From recorded
preferences (`data: recorded` on environment `preferences`), the recorded pair is used.

Deviations from the papers:

- With rollouts, the pairs come from the current policy at every step (online DPO).
- Prompts of an agent's later turns differ between the sides, because their histories differ.
- IPO's average over tokens is not in its paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm, Credit, Data, Loss, Outputs, PolicyLoss, Targets, Update
from kapelle.algorithms.shared.groups import valid_episodes
from kapelle.algorithms.shared.rewards import TeamReward, agent_returns
from kapelle.algorithms.signals.reference import ReferenceLogProbs, refreshed
from kapelle.functional import preferences
from kapelle.functional.masking import segment_mean, segment_sum
from kapelle.functional.preferences import PreferenceLoss
from kapelle.rows import Column, Signals, TurnKey, turns_of
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.settings.base import Settings
from kapelle.types import Group


class DPO(Settings):
    """Settings of direct preference optimisation."""

    name: Literal["dpo"] = "dpo"
    data: Literal["rollout", "recorded"] = "rollout"
    """Source of pairs: `rollout` compares the team's own episodes; `recorded` uses the environment's recorded pairs or its
    scripted answers."""
    kind: Literal["dpo", "ipo"] = "dpo"
    """Loss: `dpo` (2305.18290) or `ipo` (2310.12036)."""
    beta: float = Field(default=0.1, gt=0.0)
    """β, the strength of the constraint to the reference."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Probability that a pair's label is wrong."""
    nll: float = Field(default=0.0, ge=0.0)
    """α of the additional loss −log π of the chosen side per token (2404.19733 eq. 1), which keeps its likelihood high."""
    group_size: int = Field(default=2, ge=1)
    """Episodes per task; the best and the worst one form a pair."""
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
                "DPO needs two episodes per task to form a pair, even with recorded pairs (`algorithm.data: recorded` "
                "with `environment.name: preferences`); set `algorithm.group_size: 2` or more"
            )
        if self.kind == "ipo" and self.label_smoothing:
            raise ValueError("`label_smoothing` needs `kind: dpo`; remove it for `kind: ipo`")
        return self

    def build(self) -> Algorithm:
        """Return the algorithm."""
        return Algorithm(
            name=self.name,
            policy_loss=self.loss(),
            credit=self.credit,
            data=Data("rollout" if self.data == "rollout" else "demonstrations", self.group_size),
            needs=(ReferenceLogProbs(),),
            update=Update(self.epochs, self.minibatches),
            returns=partial(agent_returns, how=self.team_reward),
            after_update=refreshed(self.reference_every),
            lacks="no pairs, because all episodes of each task have equal returns",
        )

    def loss(self) -> PolicyLoss:
        """Return the loss over pairs: DPO sums log-probs over a side's tokens, IPO averages them."""
        if self.kind == "ipo":
            ipo = partial(preferences.ipo_loss, beta=self.beta)
            return partial(loss_over_pairs, reduce=segment_mean, pair_loss=ipo, nll=self.nll)
        dpo = partial(preferences.dpo_loss, beta=self.beta, label_smoothing=self.label_smoothing)
        return partial(loss_over_pairs, reduce=segment_sum, pair_loss=dpo, nll=self.nll)

    def credit(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return advantage +1 for turns of a chosen side, −1 for a rejected side, and weight 0 for other turns."""
        sides: dict[tuple[int, int, str], tuple[int, float]] = {}
        pairs = 0
        for g, group in enumerate(groups):
            for agent, (best, worst) in pairs_of(group, self.team_reward).items():
                sides[g, best, agent], sides[g, worst, agent] = (pairs, 1.0), (pairs, -1.0)
                pairs += 1
        credit: dict[TurnKey, Credit] = {}
        for key, turn in turns_of(groups):
            pair, side = sides.get((key.group, key.episode, turn.agent), (None, 0.0))
            side_T = torch.full((len(turn.completion_ids),), side)
            credit[key] = Credit(side_T, weight=abs(side), pair=pair)
        return credit


def pairs_of(group: Group, how: TeamReward) -> dict[str, tuple[int, int]]:
    """Return, for each agent, the indices of its best and its worst episode; of tied episodes, the first.

    Frozen agents, and agents with equal returns in all episodes, are absent.
    """
    returns_of: dict[str, dict[int, float]] = {}
    for _, e, episode in valid_episodes([group]):
        returns = agent_returns(episode, how)
        for agent in {turn.agent: None for turn in episode.turns if turn.trained}:
            returns_of.setdefault(agent, {})[e] = returns[agent]
    pairs: dict[str, tuple[int, int]] = {}
    for agent, returns_by_episode in returns_of.items():
        best = max(returns_by_episode, key=returns_by_episode.__getitem__)
        worst = min(returns_by_episode, key=returns_by_episode.__getitem__)
        if returns_by_episode[best] > returns_by_episode[worst]:
            pairs[agent] = best, worst
    return pairs


def loss_over_pairs(
    outputs: Outputs,
    targets: Targets,
    *,
    reduce: Callable[[Tensor, Tensor, Tensor, int], Tensor],
    pair_loss: Callable[[Tensor, Tensor, Tensor, Tensor], PreferenceLoss],
    nll: float = 0.0,
) -> Loss:
    """Return the sum over pairs of `pair_loss` plus `nll` times the chosen side's −log π per token, and the number of pairs.

    `pair_loss` takes log-probs [N] of the chosen and rejected sides of N pairs under the policy, then under the reference.
    Each is reduced over a side's tokens by `reduce` (`segment_sum` or `segment_mean`).
    """
    assert targets.pair_S is not None, "every sequence belongs to a pair"
    numbers_N, pair_S = torch.unique(targets.pair_S, return_inverse=True)
    pair_K, pairs = pair_S[targets.segment_K], len(numbers_N)
    chosen_K = (targets[Column.ADVANTAGE] > 0) & targets.mask_K.bool()
    rejected_K = (targets[Column.ADVANTAGE] < 0) & targets.mask_K.bool()
    for side_K in (chosen_K, rejected_K):
        assert len(torch.unique(pair_K[side_K])) == pairs, "both sides of a pair are in one batch"
    logp_K, reference_K = outputs.logp_K, targets[Column.REFERENCE]
    found = pair_loss(
        reduce(logp_K, chosen_K, pair_K, pairs),
        reduce(logp_K, rejected_K, pair_K, pairs),
        reduce(reference_K, chosen_K, pair_K, pairs),
        reduce(reference_K, rejected_K, pair_K, pairs),
    )
    weight = found.margin_N.new_tensor(float(pairs))
    chosen_logp_N = segment_mean(logp_K, chosen_K, pair_K, pairs)
    return Loss(
        (found.loss_N - nll * chosen_logp_N).sum(),
        weight,
        {
            "preference_accuracy": ((found.margin_N > 0).to(weight.dtype).sum(), weight),
            "preference_margin": (found.margin_N.sum(), weight),
            "chosen_logp": (chosen_logp_N.detach().sum(), weight),
            "rejected_logp": (segment_mean(logp_K.detach(), rejected_K, pair_K, pairs).sum(), weight),
        },
    )
