"""Shaping of rewards and advantages: penalties, KL in the reward, MAPoRL's and UMAD's terms.

Shapes: N completions, T tokens; for debates [..., T, A] with T turns and A agents, each agent with one completion per turn.
Lengths are in tokens. Functions return *terms* to add to the reward, unless they say otherwise, so they can be combined in any
order.
"""

from __future__ import annotations

from kapelle.functional.masking import as_float, segment_whiten
from kapelle.runtime.on_demand import Tensor, torch


def overlong_penalty(length: Tensor, *, limit: int, buffer: int) -> Tensor:
    """Compute DAPO's soft penalty: 0 up to limit − buffer tokens, decreasing linearly to −1 at the limit and beyond.

    arXiv 2503.14476, eq. 13.
    """
    return ((limit - buffer - as_float(length)) / buffer).clamp(-1.0, 0.0)


def kl_in_reward(logp: Tensor, logp_reference: Tensor, *, beta: float) -> Tensor:
    """Compute −β·(log π − log π_ref), elementwise, detached (k1, the unbiased estimator)."""
    return (-beta * (as_float(logp) - as_float(logp_reference))).detach()


def maporl_discounted_sum(own_TA: Tensor, future_TA: Tensor, *, gamma: float) -> Tensor:
    """Compute MAPoRL's reward R_t = [own_t + Σ_{t'>t} γ^{t'−t}·future_{t'}] / Σ_{t'≥t} γ^{t'−t} → [..., T, A].

    arXiv 2502.18439. `own_TA` are verifier scores. `future_TA` is their mean over agents for sharing `all`, and `own_TA` itself
    for `individual`. Scores in [0, 1] give rewards in [0, 1].
    """
    own_TA, future_TA = as_float(own_TA), as_float(future_TA)
    turns = own_TA.shape[-2]
    ahead_A, weight = torch.zeros_like(own_TA[..., 0, :]), 0.0
    rewards: list[Tensor] = []
    for t in reversed(range(turns)):
        ahead_A, weight = gamma * ahead_A, 1.0 + gamma * weight
        rewards.append((own_TA[..., t, :] + ahead_A) / weight)
        ahead_A = ahead_A + future_TA[..., t, :]
    return torch.stack(rewards[::-1], dim=-2)


def maporl_influence(correct_TA: Tensor, *, alpha: tuple[float, float, float, float]) -> Tensor:
    """Compute MAPoRL's reward for correction (✗→✓) and persuasion, and its penalty for errors (✓→✗) and misleading.

    arXiv 2502.18439. `correct_TA` (bool, [..., T, A], A ≥ 2) is true where an agent was correct at a turn. The others are
    correct if more than half of them are. The terms α0…α3, with the turn on which they are placed:

    - own ✗→✓: +α1 if the others were incorrect before, +α0 if correct; placed on the turn that made the correction.
    - own ✓→✗: −α1 if the others were correct before, −α0 if incorrect; placed on the turn that made the error.
    - others' next-turn ✗→✓: +α2 if the agent was correct, +α3 if incorrect; placed on the turn that they had read.
    - others' next-turn ✓→✗: −α2 if the agent was incorrect, −α3 if correct; placed on the turn that they had read.
    """
    agents = correct_TA.shape[-1]
    assert agents >= 2, "influence needs another agent"
    own_TA = correct_TA.bool()
    share_TA = (own_TA.sum(dim=-1, keepdim=True) - own_TA.long()).float() / (agents - 1)
    others_TA = share_TA > 0.5
    own_before, own_after = own_TA[..., :-1, :], own_TA[..., 1:, :]
    others_before, others_after = others_TA[..., :-1, :], others_TA[..., 1:, :]
    a0, a1, a2, a3 = alpha

    revision = _flip(own_before, own_after, gain=(others_before, a0, a1), loss=(others_before, a1, a0))
    persuasion = _flip(others_before, others_after, gain=(own_before, a2, a3), loss=(own_before, a3, a2))
    nothing = torch.zeros(correct_TA[..., :1, :].shape, device=correct_TA.device)
    return torch.cat([nothing, revision], dim=-2) + torch.cat([persuasion, nothing], dim=-2)


def umad_influence(reward_TA: Tensor, *, eta: float) -> Tensor:
    """Compute UMAD's influence: η·sign of the mean change of the other agents' rewards at the next turn → [..., T, A].

    arXiv 2603.01221. It uses unmodified rewards; the last turn gets 0.
    """
    reward_TA = as_float(reward_TA)
    agents = reward_TA.shape[-1]
    assert agents >= 2, "influence needs another agent"
    change_TA = reward_TA.diff(dim=-2)
    others_TA = (change_TA.sum(dim=-1, keepdim=True) - change_TA) / (agents - 1)
    return torch.cat([eta * others_TA.sign(), torch.zeros_like(reward_TA[..., :1, :])], dim=-2)


def confidence_gain(
    advantage_B: Tensor, nll_B: Tensor, group_B: Tensor, groups: int, *, alpha: float
) -> Tensor:
    """Compute UMAD's A·exp(−α·z), with z the mean NLL of a completion standardised within its set → [B].

    arXiv 2603.01221. `nll_B` is in nats per token. In a set with one member, or without variance, A is unchanged.
    """
    z_B = segment_whiten(nll_B.detach(), torch.ones_like(nll_B), group_B, groups)
    return as_float(advantage_B) * torch.exp(-alpha * z_B)


def relative_confidence_gain(advantage_BA: Tensor, nll_BA: Tensor, *, alpha: float) -> Tensor:
    """Compute UMAD's A·exp(−α·(NLL_i − mean NLL of the other agents)) → [..., A]."""
    nll_BA = as_float(nll_BA).detach()
    agents = nll_BA.shape[-1]
    assert agents >= 2, "relative confidence needs another agent"
    others_BA = (nll_BA.sum(dim=-1, keepdim=True) - nll_BA) / (agents - 1)
    return as_float(advantage_BA) * torch.exp(-alpha * (nll_BA - others_BA))


def _flip(
    before: Tensor, after: Tensor, *, gain: tuple[Tensor, float, float], loss: tuple[Tensor, float, float]
) -> Tensor:
    """Return +`gain` for ✗→✓ and −`loss` for ✓→✗; each is (condition, size if true, size if false)."""
    zero = torch.zeros(before.shape, device=before.device)
    gained = torch.where(gain[0], zero + gain[1], zero + gain[2])
    lost = torch.where(loss[0], zero + loss[1], zero + loss[2])
    return torch.where(~before & after, gained, zero) - torch.where(before & ~after, lost, zero)
