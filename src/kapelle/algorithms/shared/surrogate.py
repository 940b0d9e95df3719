"""The clipped surrogate with its options, as settings that build a pure loss.

Shapes: K target tokens, S sequences.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from kapelle.algorithm import CriticLoss, Loss, Outputs, PolicyLoss, Targets
from kapelle.functional import divergences, masking, policy_losses, value_losses
from kapelle.functional.advantages import importance_inliers, truncated_importance_weight
from kapelle.rows import Column
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.settings.base import Settings

if TYPE_CHECKING:
    from collections.abc import Callable


class SurrogateConfig(Settings):
    """−min(ρA, clip(ρ)A) per token, turn or sequence (1707.06347 eq. 7), with penalties.

    `token`: ρ of each token. `turn`: the product over a completion's tokens, one action. `sequence`: their
    geometric mean (GSPO, 2507.18071 eq. 7). The last two give one loss per completion, and are averaged over completions.
    """

    kind: Literal["clipped", "cispo", "sapo"] = "clipped"
    """`cispo`: the clipped ratio is a detached weight on log π (2506.13585). `sapo`: a sigmoid of the ratio takes the place
    of the clip, so that the gradient of a token fades with its distance (2511.20347)."""
    level: Literal["token", "turn", "sequence"] = "token"
    """Whose ratio it is: a token's, or a completion's, as the product of its tokens' (`turn`) or their geometric mean
    (`sequence`). No level joins several completions of an agent."""
    clip_low: float = Field(default=0.2, ge=0.0, lt=1.0)
    """The ratio is clipped below at 1 minus this, and above at 1 plus `clip_high`."""
    clip_high: float = Field(default=0.2, ge=0.0)
    """Greater than `clip_low` is clip-higher (DAPO, 2503.14476 eq. 10)."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bound c on the loss where A < 0 (1912.09729 eq. 5)."""
    tau_positive: float = Field(default=1.0, gt=0.0)
    """`kind: sapo`: temperature of the gate where A > 0; greater closes it nearer to a ratio of 1."""
    tau_negative: float = Field(default=1.05, gt=0.0)
    """The same where A ≤ 0."""
    sequence_mask: float | None = Field(default=None, gt=0.0)
    """δ of off-policy sequence masking, nats (DeepSeek-V3.2, 2512.02556): the tokens with A < 0 of a completion whose mean
    log-prob per token has fallen by more than this since it was sampled leave the surrogate. They still count in its weight, in
    the penalty to the reference and in the entropy bonus. null masks nothing."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] | None = None
    """`token_mean` over the global batch; `sequence_mean` as GRPO wrote it; `sequence_sum` over a constant
    number of tokens, `constant` (Dr.GRPO, 2503.20783). null follows from `level`: `token_mean` for tokens,
    `sequence_mean`, the only one that fits, for turns and sequences."""
    constant: int = Field(default=64, ge=1)
    """What `sequence_sum` is divided by, in tokens."""
    kl_coefficient: float = Field(default=0.0, ge=0.0)
    """β of the penalty to the reference policy, as a loss."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """k1 has no gradient in expectation as a loss and is not offered here."""
    entropy_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus, per nat."""
    entropy_end: float | None = Field(default=None, ge=0.0)
    """Weight of the bonus that the run comes to in a straight line, as a temperature is annealed (2206.05825): much at first keeps
    play wide while little is known, little at last lets it come near to what the reward alone asks for. null keeps
    `entropy_coefficient`."""
    importance_cap: float | None = Field(default=None, ge=1.0)
    """C of truncated importance sampling: the denominator of ρ is the trainer's own log-probs before the update, and each
    token (each completion, with `level: turn` or `sequence`) weighs min(C, π_trainer/π_sampler). Costs one more
    forward pass; null divides by the sampler's."""
    importance_range: tuple[float, float] | None = None
    """Tokens whose π_trainer/π_sampler lies outside [low, high] leave the loss and its weight: sampler and trainer
    disagree on them (IcePop, 2510.18855). For `level: token`. Costs one more forward pass; null masks nothing."""

    @model_validator(mode="after")
    def _parts_that_fit(self) -> SurrogateConfig:
        if self.kind == "cispo" and (self.level != "token" or self.dual_clip is not None):
            raise ValueError("`kind: cispo` weighs tokens: leave `level: token`, and `dual_clip` out")
        if self.kind == "sapo" and self.level != "token":
            raise ValueError("`kind: sapo` gates tokens: leave `level: token`, or set `kind: clipped`")
        unread = (
            ("clip_low", "clip_high", "dual_clip")
            if self.kind == "sapo"
            else ("tau_positive", "tau_negative")
        )
        # Values, as settings that a run has kept name every key.
        given = [key for key in unread if getattr(self, key) != type(self).model_fields[key].default]
        if given and self.kind == "sapo":
            raise ValueError(
                f"`kind: sapo` has a gate in place of clips and reads no `{given[0]}`: remove it, and set `tau_positive` and "
                "`tau_negative`"
            )
        if given:
            raise ValueError(
                f"`{given[0]}` is about the gate of `kind: sapo`: set `kind: sapo`, or remove it"
            )
        if self.level != "token" and self.aggregation not in (None, "sequence_mean"):
            raise ValueError(
                f"`level: {self.level}` gives one loss per completion; `aggregation: {self.aggregation}` would count it "
                "once for every token, so that long completions weigh more: remove `aggregation`, or set "
                "`level: token`"
            )
        if self.importance_range is not None and self.level != "token":
            raise ValueError(
                "`importance_range` masks single tokens: leave `level: token`, or set `importance_cap`"
            )
        if self.importance_range is not None and not (
            0.0 <= self.importance_range[0] <= 1.0 <= self.importance_range[1]
        ):
            raise ValueError(
                "`importance_range` is [low, high] with low ≤ 1 ≤ high: a ratio of 1 is agreement"
            )
        return self

    @property
    def old(self) -> Column:
        """Column of the log-probs in the denominator of ρ: the sampler's, or the trainer's own before the update."""
        return Column.BEHAVIOUR if self.importance_cap is None else Column.PROXIMAL

    @property
    def proximal(self) -> bool:
        """True when the loss reads the trainer's own log-probs before the update."""
        return self.importance_cap is not None or self.importance_range is not None

    @property
    def entropy(self) -> bool:
        """True when the loss of some step has an entropy bonus."""
        return max(self.entropy_coefficient, self.entropy_end or 0.0) > 0

    def build(self) -> PolicyLoss:
        """Return the loss as a pure function; with `annealed`, that of the first step."""
        return partial(surrogate_loss, settings=self)

    @property
    def annealed(self) -> Callable[[float], PolicyLoss] | None:
        """The loss by the share of the run that is done, where it changes; else None."""
        return None if self.entropy_end is None else self._at

    def _at(self, done: float) -> PolicyLoss:
        bonus = annealed(self.entropy_coefficient, self.entropy_end, done)
        return self.model_copy(update={"entropy_coefficient": bonus}).build()


def annealed(first: float, last: float | None, done: float) -> float:
    """Return a coefficient that goes from `first` to `last` in a straight line, when a share of the way is `done`; None for no change."""
    return first if last is None else first + (last - first) * min(1.0, done)


def surrogate_loss(outputs: Outputs, targets: Targets, *, settings: SurrogateConfig) -> Loss:
    """Return the sum, the weight and the metrics of one batch."""
    s, logp_K, advantage_K, mask_K = settings, outputs.logp_K, targets[Column.ADVANTAGE], targets.mask_K
    metrics: dict[str, tuple[Tensor, Tensor]] = {}
    if s.importance_range is not None:
        # Tokens on which sampler and trainer disagree leave the loss and its weight.
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
    elif s.dual_clip is None:
        terms = policy_losses.clipped_surrogate(log_ratio_K, advantage_K, **clip)
    else:
        terms = policy_losses.dual_clipped_surrogate(log_ratio_K, advantage_K, dual_clip=s.dual_clip, **clip)
    loss_K = terms.loss

    if s.importance_cap is not None:
        logprobs = [targets[column] for column in (Column.PROXIMAL, Column.BEHAVIOUR)]
        if s.level != "token":
            # The action is the whole completion, for `sequence` too: weights by a mean over its tokens would not give
            # the trainer's expectation.
            logprobs = [masking.segment_sum(logp, *completions)[targets.segment_K] for logp in logprobs]
        weight_K = truncated_importance_weight(*logprobs, cap=s.importance_cap)
        loss_K = loss_K * weight_K
        metrics["importance"] = (masking.masked_sum(weight_K, mask_K), tokens)
    if s.sequence_mask is not None:
        # Against the sampler, whatever the ratio is against: what it measures has then all reasons to differ.
        left_out_K = policy_losses.strayed_and_bad(
            logp_K, targets[Column.BEHAVIOUR], advantage_K, *completions, threshold=s.sequence_mask
        )
        loss_K = torch.where(left_out_K, 0.0, loss_K)
        metrics["sequence_masked_share"] = (masking.masked_sum(left_out_K.float(), mask_K), tokens)
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

    aggregation = s.aggregation or ("token_mean" if s.level == "token" else "sequence_mean")
    times_K = targets.columns.get(Column.WEIGHT)
    if aggregation == "token_mean":
        total, weight = masking.token_mean(loss_K, mask_K, times_K)
    elif aggregation == "sequence_mean":
        total, weight = masking.sequence_mean(loss_K, *completions, times_K)
    else:
        total, weight = masking.sequence_sum_over_constant(loss_K, *completions, times_K, constant=s.constant)
    return Loss(total, weight, metrics)


class ValueLossConfig(Settings):
    """How critics are fitted to returns."""

    coefficient: float = Field(default=0.5, gt=0.0)
    """Weight of the critic's loss."""
    clip: float | None = Field(default=None, gt=0.0)
    """Greatest distance of a value from the sampling critic's before its gradient is cut."""
    huber: float | None = Field(default=None, gt=0.0)
    """Error beyond which the loss is linear (MAPPO, 2103.01955); null is squared."""

    def build(self) -> CriticLoss:
        """Return the loss as a pure function."""
        return partial(value_loss, settings=self)


def value_loss(values_K: Tensor, targets: Targets, *, settings: ValueLossConfig) -> Loss:
    """Return the sum, the weight and the mean error of one batch."""
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
