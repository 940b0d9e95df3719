"""Advantage estimators: relative to a comparison set, a running baseline, or a critic.

Shapes: B rows (trajectories, turns or sequences, each with one reward or return), G comparison sets, N rows of T steps (tokens
or turns, time along T). The caller defines the comparison sets (a task, an agent, an agent's turn index) by int64 labels
`group_B`. Everything is computed in floating point, over unmasked entries only.
"""

from __future__ import annotations

from typing import NamedTuple

from kapelle.functional.masking import as_float, keep_masked
from kapelle.functional.policy_losses import clamp_log_ratio, token_log_ratio
from kapelle.functional.returns import backward_recurrence, next_value, turn_return_to_go
from kapelle.runtime.on_demand import Tensor, torch


class CriticAdvantage(NamedTuple):
    """Advantages from a critic, and the critic's targets; both [N, T]."""

    advantage_NT: Tensor
    target_NT: Tensor


class BaselineAdvantage(NamedTuple):
    """Advantages [B] relative to a running baseline, and the baseline (a scalar) after them."""

    advantage_B: Tensor
    baseline: Tensor


def group_scaled(reward_B: Tensor, group_B: Tensor, groups: int, *, eps: float = 1e-6) -> Tensor:
    """Compute GRPO's advantage (R − mean_g)/(std_g + eps), std with ddof 1 → [B] (arXiv 2402.03300, §4.1.2).

    A set without variance, or of one member, gives exactly 0.
    """
    shifted_B, count_G = _above_least(reward_B, group_B, groups)
    mean_G = shifted_B.new_zeros(groups).index_add(0, group_B, shifted_B) / count_G.clamp(min=1)
    deviation_B = shifted_B - mean_G[group_B]
    squared_G = shifted_B.new_zeros(groups).index_add(0, group_B, deviation_B.square())
    std_G = (squared_G / (count_G - 1).clamp(min=1)).sqrt()
    return deviation_B / (std_G[group_B] + eps)


def group_centred(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Compute Dr.GRPO's advantage R − mean_g → [B] (arXiv 2503.20783, §3.2).

    A set without variance, or of one member, gives exactly 0.
    """
    shifted_B, count_G = _above_least(reward_B, group_B, groups)
    mean_G = shifted_B.new_zeros(groups).index_add(0, group_B, shifted_B) / count_G.clamp(min=1)
    return shifted_B - mean_G[group_B]


def leave_one_out(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Compute RLOO's advantage R_j − mean of the set's other members → [B] (arXiv 2402.14740, §3.3).

    A set without variance, or of one member, gives exactly 0.
    """
    shifted_B, count_G = _above_least(reward_B, group_B, groups)
    total_G = shifted_B.new_zeros(groups).index_add(0, group_B, shifted_B)
    others_G = (count_G - 1).clamp(min=1)
    return shifted_B - (total_G[group_B] - shifted_B) / others_G[group_B]


def length_weighted_baseline(reward_B: Tensor, length_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Compute OPO's advantage R − Σ len·R / Σ len over the set, lengths in tokens → [B] (arXiv 2505.23585).

    A set without variance, or of one member, gives exactly 0.
    """
    shifted_B, _ = _above_least(reward_B, group_B, groups)
    length_B = length_B.to(shifted_B.dtype)
    weighted_G = shifted_B.new_zeros(groups).index_add(0, group_B, length_B * shifted_B)
    length_G = shifted_B.new_zeros(groups).index_add(0, group_B, length_B)
    return shifted_B - (weighted_G / length_G.clamp(min=1))[group_B]


def running_baseline(reward_B: Tensor, baseline: Tensor, *, decay: float = 0.95) -> BaselineAdvantage:
    """Compute RAE: for each reward in order b ← decay·b + (1 − decay)·R, A = R − b (SPIRAL, arXiv 2506.24119).

    There is one baseline per agent (and game): the caller passes one agent's rewards and stores the result. The new b
    contains R, so A is decay·(R − the previous b). The authors' code subtracts the previous b.
    """
    baseline = as_float(baseline)
    advantages: list[Tensor] = []
    for reward in as_float(reward_B).unbind():
        baseline = decay * baseline + (1.0 - decay) * reward
        advantages.append(reward - baseline)
    advantage_B = torch.stack(advantages) if advantages else as_float(reward_B)
    return BaselineAdvantage(advantage_B.detach(), baseline.detach())


def gae(
    reward_NT: Tensor,
    value_NT: Tensor,
    mask_NT: Tensor,
    bootstrap_N: Tensor,
    *,
    gamma: float | Tensor,
    lam: float,
) -> CriticAdvantage:
    """Compute GAE: A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γV_{t+1} − V_t, targets A + V (arXiv 1506.02438, eq. 16).

    Steps are tokens (masked observation tokens are skipped) or turns (one value per turn). `bootstrap_N` is the value after
    the last step: 0 if the row terminated, V if it was truncated. Rewards on masked steps do not count. The results are
    detached.
    """
    value_NT = as_float(value_NT).detach()
    following_NT = next_value(value_NT, mask_NT, bootstrap_N.detach())
    delta_NT = as_float(reward_NT).detach() + gamma * following_NT - value_NT
    advantage_NT = backward_recurrence(delta_NT, gamma * lam, mask_NT)
    return CriticAdvantage(advantage_NT, keep_masked(advantage_NT + value_NT, mask_NT))


def vtrace(
    log_ratio_NT: Tensor,
    reward_NT: Tensor,
    value_NT: Tensor,
    mask_NT: Tensor,
    bootstrap_N: Tensor,
    *,
    gamma: float | Tensor,
    lam: float = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    clip_policy_rho: float | None = 1.0,
) -> CriticAdvantage:
    """Compute V-trace for stale samples: targets v_t and advantages ρ̄_t·(r_t + γ·v'_{t+1} − V_t) → [N, T].

    arXiv 1802.01561, eq. 1: v_t = V_t + Σ_k γ^{k−t} (Π c) δ_k, δ = ρ̄(r + γV′ − V), ρ̄ = min(clip_rho, ρ),
    c = λ·min(clip_c, ρ). In the advantage, v' is λ·v + (1 − λ)·V and ρ̄ is min(clip_policy_rho, ρ). With None, ρ̄ is
    omitted, for a surrogate that multiplies by ρ itself. `log_ratio_NT` is log π − log π_b of the step. The results are
    detached.
    """
    ratio_NT = clamp_log_ratio(log_ratio_NT).exp().detach()
    value_NT, reward_NT = as_float(value_NT).detach(), as_float(reward_NT).detach()
    bootstrap_N = bootstrap_N.detach()
    following_NT = next_value(value_NT, mask_NT, bootstrap_N)
    delta_NT = ratio_NT.clamp(max=clip_rho) * (reward_NT + gamma * following_NT - value_NT)
    correction_NT = backward_recurrence(delta_NT, gamma * lam * ratio_NT.clamp(max=clip_c), mask_NT)
    target_NT = keep_masked(value_NT + correction_NT, mask_NT)
    corrected_NT = lam * next_value(target_NT, mask_NT, bootstrap_N) + (1.0 - lam) * following_NT
    gain_NT = reward_NT + gamma * corrected_NT - value_NT
    if clip_policy_rho is not None:
        gain_NT = ratio_NT.clamp(max=clip_policy_rho) * gain_NT
    return CriticAdvantage(keep_masked(gain_NT, mask_NT), target_NT)


def truncated_importance_weight(logp_trainer: Tensor, logp_sampler: Tensor, *, cap: float = 2.0) -> Tensor:
    """Compute the weights of truncated importance sampling, min(cap, π_trainer/π_sampler), detached, elementwise.

    They correct the loss if sampler and trainer compute different log-probs from the same weights.
    """
    return token_log_ratio(logp_trainer, logp_sampler).exp().clamp(max=cap).detach()


def importance_inliers(logp_trainer: Tensor, logp_sampler: Tensor, *, low: float, high: float) -> Tensor:
    """Return whether π_trainer/π_sampler is in [low, high] → bool, elementwise; False marks outliers."""
    ratio = token_log_ratio(logp_trainer, logp_sampler).exp()
    return (ratio >= low) & (ratio <= high)


def sum_then_normalise(reward_B: Tensor, trajectory_B: Tensor, player_B: Tensor, players: int) -> Tensor:
    """Compute MARS' advantage: each turn's return-to-go (γ = 1), normalised over all turns of its player → [B].

    arXiv 2510.15414. Turns are in global time order. `trajectory_B` labels one player's turns in one episode, `player_B` the
    player. A player with one turn in the batch gets 0.
    """
    return group_scaled(turn_return_to_go(reward_B, trajectory_B, 1.0), player_B, players)


def normalise_then_sum(reward_B: Tensor, trajectory_B: Tensor, player_B: Tensor, players: int) -> Tensor:
    """Compute MARS' advantage as its public code does: normalise rewards per player, then sum, then centre → [B].

    The centre is the mean of each player's *distinct* sums (equal within 1e-6), so a sum that many turns share counts once.
    """
    normalised_B = group_scaled(reward_B, player_B, players)
    return_B = turn_return_to_go(normalised_B, trajectory_B, 1.0)
    centred_B = return_B.clone()
    for player in range(players):
        own_B = player_B == player
        ordered = return_B[own_B].sort().values
        distinct = ordered[ordered.diff(prepend=ordered.new_tensor([-torch.inf])) > 1e-6]
        centred_B[own_B] -= distinct.mean()
    return centred_B


def _above_least(reward_B: Tensor, group_B: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return rewards minus their set's minimum → [B], and the sizes of the sets → int64 [G].

    Estimators that are invariant to a shift are computed from this, so that equal rewards become exactly 0. R − mean(R) leaves
    a rounding error, which a division by a std near 0 would amplify.
    """
    reward_B = reward_B.to(torch.promote_types(reward_B.dtype, torch.float32))
    least_G = reward_B.new_full((groups,), torch.inf).scatter_reduce(0, group_B, reward_B, "amin")
    return reward_B - least_G[group_B], group_B.bincount(minlength=groups)
