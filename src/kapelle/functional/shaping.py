"""Shape rewards and advantages: penalties, a KL term in the reward, and the terms of MAPoRL and UMAD.

Shapes: N completions, T tokens; for debates [..., T, A] with T turns and A agents, each agent with one completion per turn.
Lengths are in tokens. Unless stated otherwise, functions return *terms* that are added to the reward, so they can be combined
in any order.
"""

from __future__ import annotations

from kapelle.functional.masking import as_float, segment_whiten
from kapelle.runtime.on_demand import Tensor, torch


def overlong_penalty(length: Tensor, *, limit: int, buffer: int) -> Tensor:
    """Return DAPO's soft penalty, which is 0 up to limit − buffer tokens, decreases linearly to −1 at `limit` tokens, and is −1 beyond.

    The source is arXiv:2503.14476, eq. 13.
    """
    return ((limit - buffer - as_float(length)) / buffer).clamp(-1.0, 0.0)


def kl_in_reward(logp: Tensor, logp_reference: Tensor, *, beta: float) -> Tensor:
    """Return the detached KL term −β·(log π − log π_ref), elementwise. The KL divergence is estimated by k1, the unbiased estimator."""
    return (-beta * (as_float(logp) - as_float(logp_reference))).detach()


def maporl_discounted_sum(own_TA: Tensor, future_TA: Tensor, *, gamma: float) -> Tensor:
    """Return MAPoRL's reward R_t = [own_t + Σ_{t'>t} γ^{t'−t}·future_{t'}] / Σ_{t'≥t} γ^{t'−t} as a tensor [..., T, A].

    The source is arXiv:2502.18439. `own_TA` contains the verifier scores. `future_TA` is the mean score over agents if
    sharing is `all`, and `own_TA` itself if sharing is `individual`. Scores in [0, 1] give rewards in [0, 1].
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
    """Return MAPoRL's rewards for corrections and persuasion, and its penalties for errors and for misleading others.

    The source is arXiv:2502.18439. `correct_TA` (bool, [..., T, A], A ≥ 2) is true where an agent was correct at a turn. The
    other agents count as correct if more than half of them are correct. The terms α0…α3 are placed on turns as follows:

    - The agent changes from incorrect to correct: +α1 if the others were incorrect before, +α0 if they were correct. The term
      is placed on the turn that made the correction.
    - The agent changes from correct to incorrect: −α1 if the others were correct before, −α0 if they were incorrect. The term
      is placed on the turn that made the error.
    - The others change from incorrect to correct at the next turn: +α2 if the agent was correct, +α3 if it was incorrect. The
      term is placed on the agent's turn that the others had read.
    - The others change from correct to incorrect at the next turn: −α2 if the agent was incorrect, −α3 if it was correct. The
      term is placed on the agent's turn that the others had read.
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
    """Return UMAD's influence as a tensor [..., T, A]: η times the sign of the mean change of the other agents' rewards at the next turn.

    The source is arXiv:2603.01221. Rewards must be unmodified. The influence of the last turn is 0.
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
    """Return UMAD's advantage A·exp(−α·z) as a tensor [B], where z is the mean NLL of a completion, standardised within its set.

    The source is arXiv:2603.01221. `nll_B` is in nats per token. In a set with only one member or with equal values, A is
    unchanged.
    """
    z_B = segment_whiten(nll_B.detach(), torch.ones_like(nll_B), group_B, groups)
    return as_float(advantage_B) * torch.exp(-alpha * z_B)


def relative_confidence_gain(advantage_BA: Tensor, nll_BA: Tensor, *, alpha: float) -> Tensor:
    """Return UMAD's advantage A·exp(−α·(NLL_i − mean NLL of the other agents)) as a tensor [..., A]."""
    nll_BA = as_float(nll_BA).detach()
    agents = nll_BA.shape[-1]
    assert agents >= 2, "relative confidence needs another agent"
    others_BA = (nll_BA.sum(dim=-1, keepdim=True) - nll_BA) / (agents - 1)
    return as_float(advantage_BA) * torch.exp(-alpha * (nll_BA - others_BA))


def _flip(
    before: Tensor, after: Tensor, *, gain: tuple[Tensor, float, float], loss: tuple[Tensor, float, float]
) -> Tensor:
    """Return plus `gain` where the flag changes from false to true, and minus `loss` where it changes from true to false.

    Both arguments are tuples (condition, size if true, size if false).
    """
    zero = torch.zeros(before.shape, device=before.device)
    gained = torch.where(gain[0], zero + gain[1], zero + gain[2])
    lost = torch.where(loss[0], zero + loss[1], zero + loss[2])
    return torch.where(~before & after, gained, zero) - torch.where(before & ~after, lost, zero)
