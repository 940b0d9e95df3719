"""Losses on pairs and labels: DPO, IPO, Bradley–Terry and binary cross-entropy.

Shapes: N pairs, each a chosen and a rejected completion; B scored items. Log-probs are those of whole completions, in nats.
Reference log-probs are constants without gradient.
"""

from __future__ import annotations

from typing import NamedTuple

from kapelle.functional.masking import as_float
from kapelle.runtime.on_demand import Tensor, torch


class PreferenceLoss(NamedTuple):
    """A loss per pair [N] to minimise, and the margin of the chosen side [N], detached.

    The share of positive margins is the accuracy.
    """

    loss_N: Tensor
    margin_N: Tensor


def dpo_loss(
    chosen_logp_N: Tensor,
    rejected_logp_N: Tensor,
    chosen_reference_logp_N: Tensor,
    rejected_reference_logp_N: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> PreferenceLoss:
    """Compute DPO's loss on log-probs *summed* over each completion (arXiv 2305.18290, eq. 7); margin β·Δ.

    The loss is −(1 − s)·log σ(βΔ) − s·log σ(−βΔ), with Δ the difference of log-ratios to the reference. s is the probability
    that a label is wrong; 0 is plain DPO.
    """
    margin_N = beta * _preference_gap(
        chosen_logp_N, rejected_logp_N, chosen_reference_logp_N, rejected_reference_logp_N
    )
    log_sigmoid = torch.nn.functional.logsigmoid
    loss_N = -(1.0 - label_smoothing) * log_sigmoid(margin_N) - label_smoothing * log_sigmoid(-margin_N)
    return PreferenceLoss(loss_N, margin_N.detach())


def ipo_loss(
    chosen_logp_N: Tensor,
    rejected_logp_N: Tensor,
    chosen_reference_logp_N: Tensor,
    rejected_reference_logp_N: Tensor,
    *,
    beta: float,
) -> PreferenceLoss:
    """Compute IPO's loss (Δ − 1/(2β))² on log-probs *averaged* over each completion's tokens; margin Δ.

    arXiv 2310.12036, eq. 17. The average is not in the paper; it makes 1/(2β) reachable at any length.
    """
    gap_N = _preference_gap(
        chosen_logp_N, rejected_logp_N, chosen_reference_logp_N, rejected_reference_logp_N
    )
    return PreferenceLoss((gap_N - 1.0 / (2.0 * beta)).square(), gap_N.detach())


def bradley_terry_loss(chosen_score_N: Tensor, rejected_score_N: Tensor) -> PreferenceLoss:
    """Compute −log σ(s_chosen − s_rejected), the negative log-likelihood of the preference under Bradley–Terry → [N]."""
    margin_N = as_float(chosen_score_N) - as_float(rejected_score_N)
    return PreferenceLoss(-torch.nn.functional.logsigmoid(margin_N), margin_N.detach())


def verifier_loss(score_B: Tensor, label_B: Tensor) -> Tensor:
    """Compute the binary cross-entropy of a scalar head's raw score with labels in [0, 1] → [B]."""
    score_B = as_float(score_B)
    cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits
    return cross_entropy(score_B, label_B.to(score_B.dtype), reduction="none")


def _preference_gap(
    chosen_logp_N: Tensor,
    rejected_logp_N: Tensor,
    chosen_reference_logp_N: Tensor,
    rejected_reference_logp_N: Tensor,
) -> Tensor:
    chosen_N = as_float(chosen_logp_N) - as_float(chosen_reference_logp_N).detach()
    rejected_N = as_float(rejected_logp_N) - as_float(rejected_reference_logp_N).detach()
    return chosen_N - rejected_N
