"""Compute returns: sums of future rewards, discounted and bootstrapped.

Shapes: N rows (completions, trajectories or episodes), T steps (tokens or turns), B turns in global time order. Masked steps
(padding, observation tokens) are skipped and add no discount. Discounts are floats, or tensors [N, T] if they vary.
"""

from __future__ import annotations

from kapelle.functional.masking import as_float, keep_masked
from kapelle.runtime.on_demand import Tensor, torch


def backward_recurrence(
    x_NT: Tensor, decay: float | Tensor, mask_NT: Tensor, initial_N: Tensor | None = None
) -> Tensor:
    """Solve y_t = x_t + decay_t·y_{t+1} backward over the unmasked steps. The result is a tensor [N, T] with 0 at masked steps.

    Step t+1 is the next unmasked step. After the last unmasked step, y is `initial_N` (default: 0). All estimators of this
    package that depend on future steps use this recurrence.
    """
    x_NT = keep_masked(x_NT, mask_NT)
    decay_NT = torch.as_tensor(decay, dtype=x_NT.dtype, device=x_NT.device).expand_as(x_NT)
    on_NT = mask_NT.bool()
    carry_N = x_NT.new_zeros(x_NT.shape[0]) if initial_N is None else as_float(initial_N).to(x_NT.dtype)
    columns: list[Tensor] = []
    for t in reversed(range(x_NT.shape[1])):
        carry_N = torch.where(on_NT[:, t], x_NT[:, t] + decay_NT[:, t] * carry_N, carry_N)
        columns.append(carry_N)
    if not columns:
        return x_NT
    return keep_masked(torch.stack(columns[::-1], dim=1), mask_NT)


def next_value(value_NT: Tensor, mask_NT: Tensor, bootstrap_N: Tensor) -> Tensor:
    """Return a tensor [N, T] with the value at the next unmasked step, `bootstrap_N` at the last unmasked step, and 0 at masked steps."""
    value_NT = keep_masked(value_NT, mask_NT)
    on_NT = mask_NT.bool()
    carry_N = as_float(bootstrap_N).to(value_NT.dtype)
    columns: list[Tensor] = []
    for t in reversed(range(value_NT.shape[1])):
        columns.append(carry_N)
        carry_N = torch.where(on_NT[:, t], value_NT[:, t], carry_N)
    if not columns:
        return value_NT
    return keep_masked(torch.stack(columns[::-1], dim=1), mask_NT)


def return_to_go(reward_NT: Tensor, mask_NT: Tensor, gamma: float | Tensor) -> Tensor:
    """Return the discounted sum of rewards from each step on, Σ_{k≥t} γ^{k−t} r_k, as a tensor [N, T]."""
    return backward_recurrence(reward_NT, gamma, mask_NT)


def turn_return_to_go(reward_B: Tensor, trajectory_B: Tensor, gamma: float) -> Tensor:
    """Return the return-to-go of each turn over its own trajectory as a tensor [B].

    The turns are in global time order. `trajectory_B` (int64) labels the trajectories: one label per agent and episode if
    trajectories contain the turns of one agent, or one label per episode for a chain through all agents. γ applies per turn
    of the trajectory.
    """
    reward_B = as_float(reward_B)
    carry: dict[int, Tensor] = {}
    returns: list[Tensor] = []
    zero = reward_B.new_zeros(())
    for reward, label in zip(reward_B.flip(0).unbind(), trajectory_B.flip(0).tolist(), strict=True):
        carry[label] = reward + gamma * carry.get(label, zero)
        returns.append(carry[label])
    return torch.stack(returns[::-1]) if returns else reward_B


def lambda_return(
    reward_NT: Tensor,
    value_NT: Tensor,
    mask_NT: Tensor,
    bootstrap_N: Tensor,
    *,
    gamma: float | Tensor,
    lam: float,
) -> Tensor:
    """Return the TD(λ) return G_t = r_t + γ·((1 − λ)·V_{t+1} + λ·G_{t+1}) as a tensor [N, T]. After the end, G and V are `bootstrap_N`.

    With λ = 1, the result is the Monte Carlo return; with λ = 0, it is the one-step target. Values are constants without
    gradient.
    """
    following_NT = next_value(value_NT.detach(), mask_NT, bootstrap_N.detach())
    step_NT = as_float(reward_NT) + gamma * (1.0 - lam) * following_NT
    return backward_recurrence(step_NT, gamma * lam, mask_NT, bootstrap_N.detach())
