"""DPO for teams: the turns of each agent in the better episode are preferred to its turns in the worse episode.

Direct preference optimisation (arXiv:2305.18290, eq. 7) minimises

    −log σ(β·Δ),    Δ = log π/π_ref of the chosen side − log π/π_ref of the rejected side

with log-probs summed over the tokens of a side. The setting `label_smoothing` is the probability that a label is incorrect.
With `kind: ipo`, the loss is (Δ − 1/(2β))² (arXiv:2310.12036, eq. 17), with log-probs averaged over the tokens of a side.
Both losses depend only on a difference, so the likelihood of both sides can decrease. The setting `nll` = α adds −α·log π of
the chosen side per token (iterative reasoning preference optimisation, arXiv:2404.19733, eq. 1).

Pairs. With rollouts, the episodes of a task with the highest and the lowest return form one pair *for each agent*. The
log-prob of a side is the sum over all turns of the agent in the episode. A task whose episodes have equal returns yields no
pair. With recorded preferences (`data: recorded` with the environment `preferences`), the recorded pairs are used.

Deviations from the papers:

- With rollouts, the pairs come from the current policy at every step (online DPO).
- The prompts of an agent's later turns differ between the two sides, because the histories differ.
- The paper on IPO does not average over tokens.
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
    """The source of the pairs. With `rollout`, pairs are formed from episodes that the team samples. With `recorded`, the
    recorded pairs or the scripted answers of the environment are used."""
    kind: Literal["dpo", "ipo"] = "dpo"
    """The loss function, which is `dpo` (arXiv:2305.18290) or `ipo` (arXiv:2310.12036)."""
    beta: float = Field(default=0.1, gt=0.0)
    """β, the strength of the constraint to the reference policy."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """The probability that the label of a pair is incorrect."""
    nll: float = Field(default=0.0, ge=0.0)
    """α, the weight of an additional loss: −log π of the chosen side per token (arXiv:2404.19733, eq. 1). This additional
    loss keeps the likelihood of the chosen side high."""
    group_size: int = Field(default=2, ge=1)
    """The number of episodes per task. The episodes with the highest and the lowest return form a pair."""
    team_reward: TeamReward = "mean"
    reference_every: int = Field(default=0, ge=0)
    """The number of steps between two refreshes of the reference policy. With 0, the reference policy is never refreshed."""
    epochs: int = Field(default=1, ge=1)
    """The number of passes over the samples of each step."""
    minibatches: int = Field(default=1, ge=1)
    """The number of optimiser steps into which each pass over the samples is divided."""

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
        """Return the algorithm that these settings describe."""
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
        """Return the loss over pairs. DPO sums the log-probs over the tokens of a side, and IPO averages them."""
        if self.kind == "ipo":
            ipo = partial(preferences.ipo_loss, beta=self.beta)
            return partial(loss_over_pairs, reduce=segment_mean, pair_loss=ipo, nll=self.nll)
        dpo = partial(preferences.dpo_loss, beta=self.beta, label_smoothing=self.label_smoothing)
        return partial(loss_over_pairs, reduce=segment_sum, pair_loss=dpo, nll=self.nll)

    def credit(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return credit with advantage +1 for turns of a chosen side, −1 for turns of a rejected side, and weight 0 for all other turns."""
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
    """Return, for each agent, the indices of the episodes with its highest and its lowest return.

    If episodes are tied, the first is taken. The result does not contain frozen agents and agents with equal returns in all
    episodes.
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
    """Return the sum over pairs of `pair_loss` plus `nll` times −log π of the chosen side per token, and the number of pairs.

    The function `pair_loss` takes four tensors of shape [N] for N pairs: the log-probs of the chosen and the rejected sides
    under the policy, and the same under the reference. The function `reduce` (`segment_sum` or `segment_mean`) reduces
    log-probs over the tokens of a side.
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
