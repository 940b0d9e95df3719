"""Advantage estimators relative to a comparison set, a running baseline, or a critic.

Shapes: B rows (trajectories, turns or sequences, each with one reward or return), G comparison sets, N rows of T steps
(tokens or turns; T is the time axis). The caller defines the comparison sets by int64 labels `group_B`, for example one label
per task, agent or turn index. All values are computed in floating point over unmasked entries.
"""

from __future__ import annotations

from typing import NamedTuple

from kapelle.functional.masking import as_float, keep_masked
from kapelle.functional.policy_losses import clamp_log_ratio, token_log_ratio
from kapelle.functional.returns import backward_recurrence, next_value, turn_return_to_go
from kapelle.runtime.on_demand import Tensor, torch


class CriticAdvantage(NamedTuple):
    """Advantages from a critic and targets of the critic, both of shape [N, T]."""

    advantage_NT: Tensor
    target_NT: Tensor


class BaselineAdvantage(NamedTuple):
    """Advantages [B] relative to a running baseline, and the updated baseline (a scalar)."""

    advantage_B: Tensor
    baseline: Tensor


def group_scaled(reward_B: Tensor, group_B: Tensor, groups: int, *, eps: float = 1e-6) -> Tensor:
    """Return GRPO's advantage (R − mean_g)/(std_g + eps) as a tensor [B], with std of ddof 1 (arXiv:2402.03300, section 4.1.2).

    The advantage is exactly 0 in a set with equal rewards or with only one member.
    """
    shifted_B, count_G = _above_least(reward_B, group_B, groups)
    mean_G = shifted_B.new_zeros(groups).index_add(0, group_B, shifted_B) / count_G.clamp(min=1)
    deviation_B = shifted_B - mean_G[group_B]
    squared_G = shifted_B.new_zeros(groups).index_add(0, group_B, deviation_B.square())
    std_G = (squared_G / (count_G - 1).clamp(min=1)).sqrt()
    return deviation_B / (std_G[group_B] + eps)


def group_centred(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Return Dr.GRPO's advantage R − mean_g as a tensor [B] (arXiv:2503.20783, section 3.2).

    The advantage is exactly 0 in a set with equal rewards or with only one member.
    """
    shifted_B, count_G = _above_least(reward_B, group_B, groups)
    mean_G = shifted_B.new_zeros(groups).index_add(0, group_B, shifted_B) / count_G.clamp(min=1)
    return shifted_B - mean_G[group_B]


def group_relative(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Return MaxRL's advantage (R − mean_g)/mean_g as a tensor [B], for rewards of at least 0 (arXiv:2602.02710).

    The advantage is exactly 0 in a set with equal rewards (and so in a set with mean 0) or with only one member.
    """
    centred_B = group_centred(reward_B, group_B, groups)
    total_G = centred_B.new_zeros(groups).index_add(0, group_B, reward_B.to(centred_B.dtype))
    mean_G = total_G / group_B.bincount(minlength=groups).clamp(min=1)
    return torch.where(centred_B == 0, 0.0, centred_B / mean_G[group_B])


def leave_one_out(reward_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Return RLOO's advantage, R_j minus the mean of the set's other members, as a tensor [B] (arXiv:2402.14740, section 3.3).

    The advantage is exactly 0 in a set with equal rewards or with only one member.
    """
    shifted_B, count_G = _above_least(reward_B, group_B, groups)
    total_G = shifted_B.new_zeros(groups).index_add(0, group_B, shifted_B)
    others_G = (count_G - 1).clamp(min=1)
    return shifted_B - (total_G[group_B] - shifted_B) / others_G[group_B]


def length_weighted_baseline(reward_B: Tensor, length_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Return OPO's advantage R − Σ len·R / Σ len over the set, with lengths in tokens, as a tensor [B] (arXiv:2505.23585).

    The advantage is exactly 0 in a set with equal rewards or with only one member.
    """
    shifted_B, _ = _above_least(reward_B, group_B, groups)
    length_B = length_B.to(shifted_B.dtype)
    weighted_G = shifted_B.new_zeros(groups).index_add(0, group_B, length_B * shifted_B)
    length_G = shifted_B.new_zeros(groups).index_add(0, group_B, length_B)
    return shifted_B - (weighted_G / length_G.clamp(min=1))[group_B]


def running_baseline(reward_B: Tensor, baseline: Tensor, *, decay: float = 0.95) -> BaselineAdvantage:
    """Return RAE's advantages A = R − b, where each reward R in order first updates b to decay·b + (1 − decay)·R (arXiv:2506.24119).

    There is one baseline per agent (and game): the caller passes the rewards of one agent and stores the updated baseline. R
    is included in the new b, so A is decay·(R − the previous b). The authors' code of SPIRAL subtracts the previous b.
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
    """Compute GAE (arXiv:1506.02438, eq. 16) by the recurrence A_t = δ_t + γλ·A_{t+1} with δ_t = r_t + γV_{t+1} − V_t.

    The targets are A + V. Steps are tokens (masked observation tokens are skipped) or turns (one value per turn).
    `bootstrap_N` is the value after the last step: 0 if the row terminated, or the critic's value if the row was truncated.
    Rewards on masked steps are ignored. The results are detached.
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
    """Compute V-trace targets v_t and advantages ρ̄_t·(r_t + γ·v'_{t+1} − V_t) [N, T] for stale samples.

    The targets are v_t = V_t + Σ_k γ^{k−t} (Π c) δ_k with δ = ρ̄(r + γV′ − V), ρ̄ = min(clip_rho, ρ) and c = λ·min(clip_c, ρ)
    (arXiv:1802.01561, eq. 1). In the advantage, v' is λ·v + (1 − λ)·V and ρ̄ is min(clip_policy_rho, ρ). If `clip_policy_rho`
    is None, ρ̄ is omitted from the advantage, as required by a surrogate that multiplies by ρ itself. `log_ratio_NT` is log π
    − log π_b of each step. The results are detached.
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
    """Return the detached weights of truncated importance sampling, min(cap, π_trainer/π_sampler), elementwise.

    The weights correct the loss if sampler and trainer compute different log-probs from the same weights.
    """
    return token_log_ratio(logp_trainer, logp_sampler).exp().clamp(max=cap).detach()


def importance_inliers(logp_trainer: Tensor, logp_sampler: Tensor, *, low: float, high: float) -> Tensor:
    """Return a bool tensor that states elementwise whether π_trainer/π_sampler is in [low, high]."""
    ratio = token_log_ratio(logp_trainer, logp_sampler).exp()
    return (ratio >= low) & (ratio <= high)


def sum_then_normalise(reward_B: Tensor, trajectory_B: Tensor, player_B: Tensor, players: int) -> Tensor:
    """Return MARS' advantage as a tensor [B]: the return-to-go (γ = 1) of each turn, normalised over all turns of its player.

    The source is arXiv:2510.15414. Turns are in global time order. `trajectory_B` contains one label per player and episode,
    and `player_B` one label per player. The advantage of a player with only one turn in the batch is 0.
    """
    return group_scaled(turn_return_to_go(reward_B, trajectory_B, 1.0), player_B, players)


def normalise_then_sum(reward_B: Tensor, trajectory_B: Tensor, player_B: Tensor, players: int) -> Tensor:
    """Return MARS' advantage [B] as computed in its public code: normalise rewards per player, then sum, then centre.

    The sums of each player are centred on the mean of the player's *distinct* sums (with a tolerance of 1e-6), so a sum that
    many turns have counts once.
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
    """Return the rewards minus the minimum of their set [B], and the sizes of the sets (int64 [G]).

    Estimators that are invariant to a shift are computed from these differences, so that equal rewards become exactly 0. R −
    mean(R) would leave a rounding error, which a division by a standard deviation near 0 would amplify.
    """
    reward_B = reward_B.to(torch.promote_types(reward_B.dtype, torch.float32))
    least_G = reward_B.new_full((groups,), torch.inf).scatter_reduce(0, group_B, reward_B, "amin")
    return reward_B - least_G[group_B], group_B.bincount(minlength=groups)
