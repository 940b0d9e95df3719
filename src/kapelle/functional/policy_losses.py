"""Policy-gradient losses: log-ratios at three levels, and clipped surrogates that work at any of these levels.

Shapes: K packed tokens, S segments (sequences or turns, which are one completion each). The surrogates are elementwise
functions of tokens [K] or [N, T], or of turns [S]; the log-ratio determines the level. All log-probs and log-ratios are in
nats. Behaviour log-probs, advantages and factors are constants without gradient.

Padding can have any *finite* log-prob: the aggregation gives it a gradient of 0, but 0 times the slope of a loss at NaN or
−inf is NaN.
"""

from __future__ import annotations

from typing import NamedTuple

from kapelle.functional.masking import as_float, segment_mean, segment_sum
from kapelle.runtime.on_demand import Tensor, torch

MAX_LOG_RATIO = 20.0


class SurrogateTerms(NamedTuple):
    """A loss to minimise, and a mask of the same shape that is 1.0 where clipping has removed the gradient and 0.0 elsewhere.

    The masked mean of `clipped` is the clip share. For a soft gate, the mask is the share of the gradient that is removed,
    between 0 and 1.
    """

    loss: Tensor
    clipped: Tensor


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp log-ratios to ±20 nats, so that sums of their exponentials stay in the range of float32."""
    return as_float(log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def token_log_ratio(logp: Tensor, logp_behaviour: Tensor) -> Tensor:
    """Return log ρ_k = log π(token) − log π_b(token), clamped to ±20, for tensors of any shape."""
    return clamp_log_ratio(as_float(logp) - as_float(logp_behaviour).detach())


def turn_log_ratio(
    logp_K: Tensor, logp_behaviour_K: Tensor, mask_K: Tensor, segment_K: Tensor, segments: int
) -> Tensor:
    """Return the log-ratio Σ_k log ρ_k of each turn as one action, with the sum clamped to ±20, as a tensor [S]."""
    difference_K = as_float(logp_K) - as_float(logp_behaviour_K).detach()
    return clamp_log_ratio(segment_sum(difference_K, mask_K, segment_K, segments))


def sequence_log_ratio(
    logp_K: Tensor, logp_behaviour_K: Tensor, mask_K: Tensor, segment_K: Tensor, segments: int
) -> Tensor:
    """Return the log of GSPO's ratio: the mean of log ρ_k over the tokens of a completion, clamped to ±20, as a tensor [S].

    The source is arXiv:2507.18071, eq. 7. The result is also the `token_mean` ratio of a turn.
    """
    difference_K = as_float(logp_K) - as_float(logp_behaviour_K).detach()
    return clamp_log_ratio(segment_mean(difference_K, mask_K, segment_K, segments))


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float
) -> SurrogateTerms:
    """Return PPO's clipped surrogate −min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high)·A), elementwise.

    The sources are arXiv:1707.06347, eq. 7, and arXiv:2503.14476, eq. 10, for asymmetric bounds. A ratio equal to a bound is
    not clipped.
    """
    ratio = torch.exp(log_ratio)
    advantage = as_float(advantage).detach()
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    return SurrogateTerms(loss, clipped.to(loss.dtype))


def dual_clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = 3.0
) -> SurrogateTerms:
    """Return the clipped surrogate with the loss for A < 0 bounded by dual_clip·|A|, elementwise.

    For A < 0, dual-clip PPO maximises max(min(ρA, clip(ρ)A), cA) with c = `dual_clip` > 1 (arXiv:1912.09729).
    """
    assert dual_clip > 1.0, f"dual_clip {dual_clip} would bound on-policy losses"
    inner = clipped_surrogate(log_ratio, advantage, clip_low=clip_low, clip_high=clip_high)
    advantage = as_float(advantage).detach()
    negative = advantage < 0
    bound = -dual_clip * advantage
    loss = torch.where(negative, torch.minimum(inner.loss, bound), inner.loss)
    bounded = negative & (torch.exp(log_ratio) > dual_clip)
    return SurrogateTerms(loss, torch.maximum(inner.clipped, bounded.to(inner.clipped.dtype)))


def cispo(
    logp: Tensor, log_ratio: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float
) -> SurrogateTerms:
    """Return CISPO's loss −sg[clip(ρ, 1 − clip_low, 1 + clip_high)]·A·log π, elementwise, where sg is the stop-gradient.

    The source is arXiv:2506.13585, eq. 4. Clipping bounds the weight of a token and keeps its gradient; `clipped` marks
    bounded weights.
    """
    ratio = torch.exp(log_ratio).detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -weight * as_float(advantage).detach() * as_float(logp)
    return SurrogateTerms(loss, (weight != ratio).to(loss.dtype))


def soft_gated_surrogate(
    log_ratio: Tensor, advantage: Tensor, *, tau_positive: float, tau_negative: float
) -> SurrogateTerms:
    """Return SAPO's loss −(4/τ)·σ(τ·(ρ − 1))·A, elementwise, where τ is `tau_positive` for A > 0 and `tau_negative` otherwise.

    The source is arXiv:2511.20347. The gradient with respect to log π is −4σ(1 − σ)·ρ·A. At ρ = 1 it equals the gradient of
    −ρA, and on both sides the factor 4σ(1 − σ) decreases smoothly, faster for larger τ. `clipped` is the share of the
    gradient that the gate removes, 1 − 4σ(1 − σ).
    """
    advantage = as_float(advantage).detach()
    tau = torch.where(advantage > 0, tau_positive, tau_negative)
    open_share = torch.sigmoid(tau * (torch.exp(log_ratio) - 1.0))
    removed = 1.0 - 4.0 * (open_share * (1.0 - open_share)).detach()
    return SurrogateTerms(-4.0 / tau * open_share * advantage, removed)


def divergence_masked_surrogate(
    logp: Tensor, logp_behaviour: Tensor, log_ratio: Tensor, advantage: Tensor, *, divergence: float
) -> SurrogateTerms:
    """Return DPPO's loss −ρA, which is 0 where sign(A)·(π − π_b) > `divergence`, elementwise (arXiv:2602.04879).

    π and π_b are the probabilities of the token, so |π − π_b| is the total variation between the two policies if all other
    tokens count as one (Binary-TV). A token is dropped only if its update would increase this distance. `logp_behaviour` is
    that of the sampler. `clipped` marks dropped tokens.
    """
    advantage = as_float(advantage).detach()
    moved = (as_float(logp).exp() - as_float(logp_behaviour).exp()).detach()
    dropped = advantage.sign() * moved > divergence
    loss = torch.where(dropped, 0.0, -torch.exp(log_ratio) * advantage)
    return SurrogateTerms(loss, dropped.to(loss.dtype))


def off_policy_mask(
    logp_K: Tensor,
    logp_behaviour_K: Tensor,
    advantage_K: Tensor,
    mask_K: Tensor,
    segment_K: Tensor,
    segments: int,
    *,
    threshold: float,
) -> Tensor:
    """Return a bool tensor [K] of the tokens that off-policy sequence masking removes (DeepSeek-V3.2, arXiv:2512.02556).

    A token is removed if A < 0 and the mean log-prob per token of its completion is more than `threshold` nats below that of
    the sampler.
    """
    with torch.no_grad():
        far_S = sequence_log_ratio(logp_K, logp_behaviour_K, mask_K, segment_K, segments) < -threshold
        return far_S[segment_K] & (advantage_K < 0)


def policy_gradient(logp: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """Return the policy-gradient loss −sg[ρ]·A·log π, elementwise, where sg is the stop-gradient.

    The gradient equals that of the unclipped surrogate −ρA. The source is arXiv:1602.01783, section 4; ρ is added for samples
    from other weights.
    """
    return -torch.exp(log_ratio).detach() * as_float(advantage).detach() * as_float(logp)


def happo_factor(factor_S: Tensor, log_ratio_S: Tensor, acted_S: Tensor) -> Tensor:
    """Return HAPPO's factor M multiplied by the ratio ρ of the agent that was just updated, as a detached tensor [S].

    The recursion is M^{m+1} = ρ_new^{i_m}·M^m (arXiv:2109.11251, section 4.2). `log_ratio_S` is the agent's log-ratio per
    turn between its updated policy and the policy that sampled. If `acted_S` is 0, the agent has no turn in the round and its
    ratio counts as 1.
    """
    ratio_S = torch.where(acted_S.bool(), torch.exp(clamp_log_ratio(log_ratio_S)), 1.0)
    return (as_float(factor_S) * ratio_S).detach()
