"""Compute log-probs and entropies from logits, and estimate the divergence from a reference policy.

Shapes: K tokens, V entries of the vocabulary. All values are in nats and have at least float32 precision. Log-probs are those
of the tempered distribution softmax(logits / temperature), from which tokens were sampled.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

from kapelle.functional.masking import as_float
from kapelle.runtime.on_demand import Tensor, torch

MAX_K3 = 10.0
MAX_LOG_RATIO = 20.0


class TokenStatistics(NamedTuple):
    """The log-prob of each token under a policy [K], and the entropy of the policy's distribution at each token [K]."""

    logp_K: Tensor
    entropy_K: Tensor


def kl_k1(logp: Tensor, logp_reference: Tensor) -> Tensor:
    """Return k1 = log π − log π_ref at sampled tokens, elementwise. The estimator k1 is unbiased for KL(π‖π_ref) and can be negative.

    The estimator k1 is used for the KL penalty in the reward. As a loss, its expected gradient is zero on-policy.
    """
    return as_float(logp) - as_float(logp_reference).detach()


def kl_k2(logp: Tensor, logp_reference: Tensor) -> Tensor:
    """Return k2 = ½(log π − log π_ref)² at sampled tokens, elementwise. The expected gradient of k2 is that of KL(π‖π_ref)."""
    return 0.5 * kl_k1(logp, logp_reference).square()


def kl_k3(logp: Tensor, logp_reference: Tensor) -> Tensor:
    """Return k3 = exp(d) − d − 1 with d = log π_ref − log π, elementwise. The estimator k3 is at least 0 and is clamped to at most 10.

    Except for the bound, k3 is an unbiased estimate of KL(π‖π_ref) (GRPO, arXiv:2402.03300, eq. 4). As a loss, the expected
    on-policy gradient of k3 is that of KL(π_ref‖π), whereas k2 has the gradient of KL(π‖π_ref). Beyond the bound, which is
    reached at d = 2.60 and d = −11.0, the gradient is 0.
    """
    d = (as_float(logp_reference).detach() - as_float(logp)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # Near 0, expm1(d) − d keeps twice as many digits as exp(d) − d − 1.
    return (torch.expm1(d) - d).clamp(max=MAX_K3)


def kl_reweighted(logp: Tensor, logp_other: Tensor, log_ratio: Tensor) -> Tensor:
    """Return ρ·(log π − log ν) − ρ + 1 at tokens of another policy, elementwise. `log_ratio` is log ρ = log π/π_sampler.

    For tokens of the sampler, the expectation of this term is KL(π‖ν) and its expected gradient is that of KL(π‖ν), however
    far π is from the sampler. Because E[ρ] = 1, the terms −ρ + 1 only reduce the variance. The result is at least 0 if ν is
    the sampler.
    """
    ratio = torch.exp(log_ratio)
    return ratio * kl_k1(logp, logp_other) - ratio + 1.0


Divergence: TypeAlias = Literal["reverse", "forward", "jensen_shannon"]
"""A divergence of a policy π from a target T: KL(π‖T), KL(T‖π), or the Jensen–Shannon divergence, all in nats."""


def towards(log_ratio: Tensor, divergence: Divergence) -> Tensor:
    """Return the advantage with which sampled tokens decrease a divergence from a target T, elementwise.

    `log_ratio` is log u = log T − log π at tokens of π. A divergence E_π[f(u)] has the gradient E_π[∇log π·(f(u) − u·f'(u))]; the
    result is the negative of this weight, shifted by a constant so that it is 0 at u = 1: log u for KL(π‖T), u − 1 for KL(T‖π), and
    ½·log((1 + u)/2) for Jensen–Shannon. The log-ratio is clamped to ±20 for KL(T‖π).
    """
    log_ratio = as_float(log_ratio)
    if divergence == "reverse":
        return log_ratio
    if divergence == "forward":
        return torch.expm1(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return 0.5 * (torch.nn.functional.softplus(log_ratio) - math.log(2.0))


def entropy_from_logits(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the entropy −Σ p log p of softmax(logits / temperature) over the last axis. `logits` [..., V] give entropies [...].

    Logits of −inf (forbidden tokens) have probability 0 and do not affect the value or the gradient.
    """
    logp = torch.log_softmax(as_float(logits) / temperature, dim=-1)
    # 0·(−inf) is NaN; for p = 0 any finite log-prob gives the product 0.
    return -(logp.exp() * logp.masked_fill(torch.isneginf(logp), 0.0)).sum(dim=-1)


def token_logprobs(logits: Tensor, token: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the log-prob of each token under softmax(logits / temperature).

    The shapes are `logits` [..., V], `token` (int64) [...] and the result [...].
    """
    assert logits.shape[:-1] == token.shape, f"logits {logits.shape} and tokens {token.shape} do not match"
    logits = as_float(logits) / temperature
    chosen = logits.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(dim=-1)
