"""Settings of the clipped surrogate loss and of the value loss. Both classes build a pure loss function.

Shapes: K target tokens, S sequences.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from kapelle.algorithm import CriticLoss, CriticSpec, Loss, Outputs, PolicyLoss, Targets
from kapelle.functional import divergences, masking, policy_losses, value_losses
from kapelle.functional.advantages import importance_inliers, truncated_importance_weight
from kapelle.rows import Column
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.settings.base import Settings

if TYPE_CHECKING:
    from collections.abc import Callable


_KEYS_OF_KINDS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("clip_low", "clip_high", "dual_clip"), ("clipped", "cispo")),
    (("tau_positive", "tau_negative"), ("sapo",)),
    (("divergence",), ("dppo",)),
)
"""Pairs of settings and of the values of `kind` that use them."""


class SurrogateConfig(Settings):
    """Settings of the clipped surrogate −min(ρA, clip(ρ)A) per token, turn or sequence (arXiv:1707.06347, eq. 7), with penalties.

    With `level: token`, ρ is the ratio of one token. With `level: turn`, ρ is the product of the ratios of all tokens in a
    completion, so the completion is one action. With `level: sequence`, ρ is the geometric mean of these ratios (GSPO,
    arXiv:2507.18071, eq. 7). With `turn` and `sequence`, there is one loss per completion, which is averaged over
    completions.
    """

    kind: Literal["clipped", "cispo", "sapo", "dppo"] = "clipped"
    """The form of the loss. `clipped` is PPO's clipped surrogate. With `cispo`, the clipped ratio is a detached weight on log
    π (arXiv:2506.13585). With `sapo`, a sigmoid of the ratio replaces clipping, so that the gradient of a token decreases
    with the distance of its ratio from 1 (arXiv:2511.20347). With `dppo`, a token is dropped if its probability has already
    changed by more than `divergence` since sampling, in the direction of its advantage (arXiv:2602.04879)."""
    level: Literal["token", "turn", "sequence"] = "token"
    """The unit of the ratio: one token (`token`), or one completion with the product (`turn`) or the geometric mean
    (`sequence`) of the ratios of its tokens. Several completions of one agent have separate ratios at every level."""
    clip_low: float = Field(default=0.2, ge=0.0, lt=1.0)
    """The distance of the lower clip bound from 1."""
    clip_high: float = Field(default=0.2, ge=0.0)
    """The distance of the upper clip bound from 1. A value above `clip_low` is clip-higher as in DAPO (arXiv:2503.14476, eq.
    10)."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """The bound c of dual clipping for negative advantages (arXiv:1912.09729, eq. 5). With null, there is no dual clipping."""
    tau_positive: float = Field(default=1.0, gt=0.0)
    """The temperature of the gate of `kind: sapo` for positive advantages. The larger the temperature, the closer to a ratio
    of 1 the gate closes."""
    tau_negative: float = Field(default=1.05, gt=0.0)
    """The temperature of the gate of `kind: sapo` for negative advantages and advantages of 0."""
    divergence: float = Field(default=0.15, gt=0.0, lt=1.0)
    """The bound δ of `kind: dppo` on the change of a token's probability. A token with advantage A is dropped if sign(A)·(π −
    π_b) > δ, where π_b is the sampler's probability. Dropped tokens still count in the weight of the loss, in the KL penalty
    and in the entropy bonus."""
    sequence_mask: float | None = Field(default=None, gt=0.0)
    """The threshold δ of off-policy sequence masking, in nats (DeepSeek-V3.2, arXiv:2512.02556). Tokens with a negative
    advantage are removed from the surrogate if the mean log-prob of their completion has decreased by more than δ per token
    since sampling. Removed tokens still count in the weight of the loss, in the KL penalty and in the entropy bonus. With
    null, no tokens are removed."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] | None = None
    """How token losses are averaged: over all tokens of the global batch (`token_mean`), per completion and then over
    completions as in the GRPO paper (`sequence_mean`), or as sums per completion divided by `constant` tokens
    (`sequence_sum`, Dr.GRPO, arXiv:2503.20783). The default, null, is `token_mean` for `level: token` and `sequence_mean`
    otherwise."""
    constant: int = Field(default=64, ge=1)
    """The divisor of `aggregation: sequence_sum`, in tokens."""
    kl_coefficient: float = Field(default=0.0, ge=0.0)
    """β, the coefficient of the KL penalty to the reference policy in the loss."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """The estimator of the KL penalty. The estimator k1 is not available, because its expected gradient as a loss is zero."""
    entropy_coefficient: float = Field(default=0.0, ge=0.0)
    """The weight of the entropy bonus, per nat of entropy."""
    entropy_end: float | None = Field(default=None, ge=0.0)
    """The weight of the entropy bonus at the end of the run. The weight changes linearly from `entropy_coefficient` to this
    value (like an annealed temperature, arXiv:2206.05825); with null, it is constant. A high weight keeps early policies
    diverse, and a low final weight lets the policies approach the optimum of the reward alone."""
    world_model: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """α, the weight of the loss on the agent's next observations (ECHO, arXiv:2605.24517). The policy then also learns to predict
    the tokens that its next prompt adds after its completion, such as the results of tools. Their negative log-likelihood is
    averaged by `aggregation` like the policy loss and divided by the same divisor, which counts only generated tokens or
    completions. With 0, observations are not trained on."""
    importance_cap: float | None = Field(default=None, ge=1.0)
    """The cap C of truncated importance sampling. If the cap is set, the denominator of ρ is the trainer's probability before
    the update, and each token has the weight min(C, π_trainer/π_sampler). With `level: turn` or `sequence`, each completion
    has one weight. Importance sampling needs one more forward pass. With null, no importance weights are applied."""
    importance_range: tuple[float, float] | None = None
    """The range [low, high] of the ratio π_trainer/π_sampler in which tokens are trained on (IcePop, arXiv:2510.18855).
    Tokens outside the range are masked in the loss and in its weight. Masking needs `level: token` and one more forward pass.
    With null, no tokens are masked."""

    @model_validator(mode="after")
    def _consistent(self) -> SurrogateConfig:
        if self.kind == "cispo" and (self.level != "token" or self.dual_clip is not None):
            raise ValueError(
                "`kind: cispo` needs `level: token` and does not support `dual_clip`; set `level: token` and remove "
                "`dual_clip`"
            )
        if self.kind in ("sapo", "dppo") and self.level != "token":
            what = "gate" if self.kind == "sapo" else "bound"
            raise ValueError(
                f"`kind: {self.kind}` has one {what} per token; set `level: token`, or `kind: clipped`"
            )
        # Compare values: the resolved settings of a run name every key.
        for keys, kinds in _KEYS_OF_KINDS:
            for key in keys if self.kind not in kinds else ():
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(
                        f"`kind: {self.kind}` does not use `{key}`; remove it, or set `kind: {kinds[0]}`"
                    )
        if self.level != "token" and self.aggregation not in (None, "sequence_mean"):
            raise ValueError(
                f"`level: {self.level}` has one loss per completion, which `aggregation: {self.aggregation}` would weight by its "
                "length; remove `aggregation`, or set `level: token`"
            )
        if self.importance_range is not None:
            low, high = self.importance_range
            if self.level != "token":
                raise ValueError(
                    "`importance_range` masks single tokens; set `level: token`, or use `importance_cap` instead"
                )
            if not 0.0 <= low <= 1.0 <= high:
                raise ValueError("`importance_range` must be [low, high] with 0 ≤ low ≤ 1 and high ≥ 1")
        return self

    @property
    def old(self) -> Column:
        """The column of the log-probs in the denominator of ρ: those of the sampler, or those of the trainer before the update."""
        return Column.BEHAVIOUR if self.importance_cap is None else Column.PROXIMAL

    @property
    def proximal(self) -> bool:
        """Whether the loss needs the log-probs of the trainer before the update."""
        return self.importance_cap is not None or self.importance_range is not None

    @property
    def entropy(self) -> bool:
        """Whether the loss has an entropy bonus in at least one step."""
        return max(self.entropy_coefficient, self.entropy_end or 0.0) > 0

    def build(self) -> PolicyLoss:
        """Return the policy loss as a pure function. With `entropy_end`, return the loss of the first step."""
        return partial(surrogate_loss, settings=self)

    @property
    def annealed(self) -> Callable[[float], PolicyLoss] | None:
        """A function from the completed share of the run to the loss, or None if the loss is constant."""
        return None if self.entropy_end is None else self._at

    def _at(self, done: float) -> PolicyLoss:
        bonus = annealed(self.entropy_coefficient, self.entropy_end, done)
        return self.model_copy(update={"entropy_coefficient": bonus}).build()


def annealed(first: float, last: float | None, done: float) -> float:
    """Return a coefficient that changes linearly from `first` to `last` with the completed share `done` of the run.

    If `last` is None, return `first`.
    """
    return first if last is None else first + (last - first) * min(1.0, done)


def surrogate_loss(outputs: Outputs, targets: Targets, *, settings: SurrogateConfig) -> Loss:
    """Return the sum, the weight and the metrics of the policy loss of one batch."""
    s, logp_K, advantage_K, mask_K = settings, outputs.logp_K, targets[Column.ADVANTAGE], targets.mask_K
    metrics: dict[str, tuple[Tensor, Tensor]] = {}
    if s.importance_range is not None:
        # Mask tokens on which sampler and trainer disagree, in the loss and in its weight.
        low, high = s.importance_range
        inside_K = importance_inliers(targets[Column.PROXIMAL], targets[Column.BEHAVIOUR], low=low, high=high)
        mask_K = mask_K * inside_K
        metrics["masked_share"] = ((targets.mask_K - mask_K).sum(), targets.mask_K.sum())
    tokens = mask_K.sum()
    completions = (mask_K, targets.segment_K, targets.segments)

    if s.level == "token":
        log_ratio_K = policy_losses.token_log_ratio(logp_K, targets[s.old])
    else:
        levels = {"turn": policy_losses.turn_log_ratio, "sequence": policy_losses.sequence_log_ratio}
        log_ratio_K = levels[s.level](logp_K, targets[s.old], *completions)[targets.segment_K]
    clip = {"clip_low": s.clip_low, "clip_high": s.clip_high}
    if s.kind == "cispo":
        terms = policy_losses.cispo(logp_K, log_ratio_K, advantage_K, **clip)
    elif s.kind == "sapo":
        terms = policy_losses.soft_gated_surrogate(
            log_ratio_K, advantage_K, tau_positive=s.tau_positive, tau_negative=s.tau_negative
        )
    elif s.kind == "dppo":
        # The bound is on the distance from the sampler, also if ρ is the ratio to the trainer's weights before the update.
        terms = policy_losses.divergence_masked_surrogate(
            logp_K, targets[Column.BEHAVIOUR], log_ratio_K, advantage_K, divergence=s.divergence
        )
    elif s.dual_clip is None:
        terms = policy_losses.clipped_surrogate(log_ratio_K, advantage_K, **clip)
    else:
        terms = policy_losses.dual_clipped_surrogate(log_ratio_K, advantage_K, dual_clip=s.dual_clip, **clip)
    loss_K = terms.loss

    if s.importance_cap is not None:
        logprobs = [targets[column] for column in (Column.PROXIMAL, Column.BEHAVIOUR)]
        if s.level != "token":
            # The action is the whole completion, for `sequence` too: a weight from the mean over its tokens would have
            # a different expectation from the trainer's.
            logprobs = [masking.segment_sum(logp, *completions)[targets.segment_K] for logp in logprobs]
        weight_K = truncated_importance_weight(*logprobs, cap=s.importance_cap)
        loss_K = loss_K * weight_K
        metrics["importance"] = (masking.masked_sum(weight_K, mask_K), tokens)
    if s.sequence_mask is not None:
        # Always compare with the sampler's log-probs, so that this measures every cause of drift.
        dropped_K = policy_losses.off_policy_mask(
            logp_K, targets[Column.BEHAVIOUR], advantage_K, *completions, threshold=s.sequence_mask
        )
        loss_K = torch.where(dropped_K, 0.0, loss_K)
        metrics["sequence_masked_share"] = (masking.masked_sum(dropped_K.float(), mask_K), tokens)
    drift_K = divergences.kl_k3(targets[Column.BEHAVIOUR], logp_K.detach())
    metrics["clip_share"] = (masking.masked_sum(terms.clipped, mask_K), tokens)
    metrics["drift"] = (masking.masked_sum(drift_K, mask_K), tokens)
    if Column.REFERENCE in targets.columns:
        divergence = {"k2": divergences.kl_k2, "k3": divergences.kl_k3}[s.kl_estimator]
        kl_K = divergence(logp_K, targets[Column.REFERENCE])
        loss_K = loss_K + s.kl_coefficient * kl_K
        metrics["kl"] = (masking.masked_sum(kl_K.detach(), mask_K), tokens)
    if s.entropy_coefficient:
        assert outputs.entropy_K is not None, "an entropy bonus needs `Algorithm.entropy`"
        loss_K = loss_K - s.entropy_coefficient * outputs.entropy_K

    times_K = targets.columns.get(Column.WEIGHT)
    total, weight = _aggregated(s, loss_K, mask_K, targets, times_K)
    if s.world_model and targets.observed_S is not None:
        observed_K = targets.observed_S[targets.segment_K]
        total = total + s.world_model * _aggregated(s, -logp_K, observed_K, targets).total
        metrics["nll_heard"] = (masking.masked_sum(-logp_K.detach(), observed_K), observed_K.sum())
    return Loss(total, weight, metrics)


def _aggregated(
    s: SurrogateConfig, loss_K: Tensor, mask_K: Tensor, targets: Targets, times_K: Tensor | None = None
) -> masking.WeightedSum:
    aggregation = s.aggregation or ("token_mean" if s.level == "token" else "sequence_mean")
    completions = (mask_K, targets.segment_K, targets.segments)
    if aggregation == "token_mean":
        return masking.token_mean(loss_K, mask_K, times_K)
    if aggregation == "sequence_mean":
        return masking.sequence_mean(loss_K, *completions, times_K)
    return masking.sequence_sum_over_constant(loss_K, *completions, times_K, constant=s.constant)


class ValueLossConfig(Settings):
    """Settings of the loss of the critics."""

    coefficient: float = Field(default=0.5, gt=0.0)
    """The weight of the critic's loss."""
    clip: float | None = Field(default=None, gt=0.0)
    """The maximum distance of a value from the value that the critic predicted at sampling; beyond it, the value is clipped.
    With null, values are not clipped."""
    huber: float | None = Field(default=None, gt=0.0)
    """The absolute error above which the loss is linear (Huber loss, MAPPO, arXiv:2103.01955). With null, the loss is the
    squared error."""

    def build(self) -> CriticLoss:
        """Return the value loss as a pure function."""
        return partial(value_loss, settings=self)

    def q_critic(self) -> CriticSpec:
        """Return the specification of a central critic that estimates one value after each turn (Q)."""
        return CriticSpec("central", self.build(), "shared", self.coefficient, unit="after", bootstraps=False)


def value_loss(values_K: Tensor, targets: Targets, *, settings: ValueLossConfig) -> Loss:
    """Return the sum, the weight and the mean absolute error of the value loss of one batch."""
    s, return_K, before_K = settings, targets[Column.RETURN], targets[Column.VALUE]
    if s.clip is not None and s.huber is not None:
        loss_K = value_losses.clipped_huber_value_loss(
            values_K, before_K, return_K, clip=s.clip, delta=s.huber
        ).loss
    elif s.clip is not None:
        loss_K = value_losses.clipped_value_loss(values_K, before_K, return_K, clip=s.clip).loss
    elif s.huber is not None:
        loss_K = value_losses.huber_value_loss(values_K, return_K, delta=s.huber)
    else:
        loss_K = value_losses.squared_value_loss(values_K, return_K)
    total, weight = masking.token_mean(loss_K, targets.mask_K)
    error_K = (values_K.detach() - return_K).abs()
    return Loss(total, weight, {"value_error": (masking.masked_sum(error_K, targets.mask_K), weight)})
