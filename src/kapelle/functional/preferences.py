"""Losses over pairs and labels, including DPO, IPO, Bradley–Terry and binary cross-entropy.

Shapes: N pairs of a chosen and a rejected completion, B scored items. Log-probs are those of whole completions, in nats.
Reference log-probs are constants without gradient.
"""

from __future__ import annotations

from typing import NamedTuple

from kapelle.functional.masking import as_float
from kapelle.runtime.on_demand import Tensor, torch


class PreferenceLoss(NamedTuple):
    """The loss of each pair [N], and the detached margin of the chosen side [N].

    The share of positive margins is the preference accuracy.
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
    """Return DPO's loss for log-probs *summed* over each completion, with the margin β·Δ (arXiv:2305.18290, eq. 7).

    The loss is −(1 − s)·log σ(βΔ) − s·log σ(−βΔ), where Δ is the difference of the log-ratios to the reference.
    `label_smoothing` is s, the probability that a label is incorrect; s = 0 is plain DPO.
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
    """Return IPO's loss (Δ − 1/(2β))² for log-probs *averaged* over the tokens of each completion, with the margin Δ.

    The source is arXiv:2310.12036, eq. 17. The paper does not average over tokens; averaging makes the target 1/(2β)
    reachable at any length.
    """
    gap_N = _preference_gap(
        chosen_logp_N, rejected_logp_N, chosen_reference_logp_N, rejected_reference_logp_N
    )
    return PreferenceLoss((gap_N - 1.0 / (2.0 * beta)).square(), gap_N.detach())


def bradley_terry_loss(chosen_score_N: Tensor, rejected_score_N: Tensor) -> PreferenceLoss:
    """Return −log σ(s_chosen − s_rejected), the negative log-likelihood of the preferences under Bradley–Terry, as tensors [N]."""
    margin_N = as_float(chosen_score_N) - as_float(rejected_score_N)
    return PreferenceLoss(-torch.nn.functional.logsigmoid(margin_N), margin_N.detach())


def verifier_loss(score_B: Tensor, label_B: Tensor) -> Tensor:
    """Return the binary cross-entropy between raw scores of a scalar head and labels in [0, 1], as a tensor [B]."""
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
