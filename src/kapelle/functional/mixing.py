"""Functions for value decomposition: mix the utilities of agents, compute credit from the mix, and update target networks.

Shapes: B rows (a round of an episode), A agents, H mixing units. `acted_BA` is 1 if an agent has a turn in the round.
Otherwise, the mix excludes the agent's utility, and the agent's credit is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kapelle.functional.masking import as_float, keep_masked, segment_mean
from kapelle.runtime.on_demand import Tensor, torch


def vdn_mix(utility_BA: Tensor, acted_BA: Tensor) -> Tensor:
    """Return VDN's Q_tot = Σ_i Q_i, the sum over the last axis (arXiv:1706.05296, eq. 2).

    If the inputs are values per position instead of utilities, the result is the token-level sum Σ_i V_i.
    """
    return keep_masked(utility_BA, acted_BA).sum(dim=-1)


def qmix_mix(
    utility_BA: Tensor, acted_BA: Tensor, w1_BAH: Tensor, b1_BH: Tensor, w2_BH: Tensor, value_B: Tensor
) -> Tensor:
    """Return QMIX's Q_tot = |W2|·ELU(|W1|·Q + b1) + V [B], which is monotonic in every Q_i (arXiv:1803.11485, section 4.1).

    The weights are the signed outputs of the hypernetworks; this function computes their absolute values.
    """
    utility_BA = keep_masked(utility_BA, acted_BA)
    hidden_BH = torch.nn.functional.elu(torch.einsum("ba,bah->bh", utility_BA, w1_BAH.abs()) + b1_BH)
    return (hidden_BH * w2_BH.abs()).sum(dim=-1) + value_B


def group_mean_utility(utility_BA: Tensor, acted_BA: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Return, for each row, the mean utility of each agent over the rows of the set in which the agent acted, as a tensor [B, A]."""
    columns = [
        segment_mean(utility_B, acted_B, group_B, groups)[group_B]
        for utility_B, acted_B in zip(utility_BA.unbind(1), acted_BA.unbind(1), strict=True)
    ]
    return torch.stack(columns, dim=1)


def difference_credit(
    mix: Callable[[Tensor], Tensor], utility_BA: Tensor, acted_BA: Tensor, baseline_BA: Tensor
) -> Tensor:
    """Return the credit Q_tot(Q) − Q_tot(Q with Q_i replaced by its baseline) of each agent i, as a detached tensor [B, A].

    The function `mix` maps utilities [B, A] to Q_tot [B], with everything else (state, mask) fixed. The baseline is
    `group_mean_utility`. The credit is 0 for an agent whose turn makes no difference, and has the same scale for all agents.
    """
    utility_BA, baseline_BA = as_float(utility_BA).detach(), as_float(baseline_BA).detach()
    total_B = mix(utility_BA)
    differences: list[Tensor] = []
    for agent in range(utility_BA.shape[1]):
        without_BA = utility_BA.clone()
        without_BA[:, agent] = baseline_BA[:, agent]
        differences.append(total_B - mix(without_BA))
    return keep_masked(torch.stack(differences, dim=1), acted_BA).detach()


def explained_by_others(
    mix: Callable[[Tensor, Tensor, Tensor], Tensor], utility_NA: Tensor, acted_NA: Tensor, after_NAA: Tensor
) -> Tensor:
    """Return a baseline: the part of a row's difference from its set that the other agents explain, as a detached tensor [N, A].

    For row n and agent i, the baseline is B_n − mean_m B_m over the rows m in which i acted. B_m is the mean of Q_tot of row
    m when the utility of i is replaced by each of its utilities in rows other than n. Agents that acted after i are excluded,
    because their turns can depend on i's turn (`after_NAA[m, i, j]` is 1 if agent j acted after i in row m). The baseline is
    independent of i's action in row n, so it can be subtracted from a return without changing the expected gradient.

    B_m is the mean of mixes, not the mix of the mean utility, which is different if the mix is nonlinear. The function `mix`
    maps utilities [K, A], the mask of agents in the mix [K, A], and the rows [K] whose states are used, to Q_tot [K]. The
    baseline is 0 in a set with one row.
    """
    utility_NA = as_float(utility_NA).detach()
    rows, agents = utility_NA.shape
    row_K = torch.arange(rows, device=utility_NA.device).repeat_interleave(rows)
    differences: list[Tensor] = []
    for i in range(agents):
        # Q_tot of row m with i's utility from row k.
        replaced_MKA = utility_NA[:, None].repeat(1, rows, 1)
        replaced_MKA[:, :, i] = utility_NA[:, i]
        part_MA = keep_masked(acted_NA, 1 - after_NAA[:, i].to(acted_NA.dtype))
        total_MK = mix(replaced_MKA.flatten(0, 1), part_MA.repeat_interleave(rows, 0), row_K).view(rows, rows)
        acted_N = acted_NA[:, i].to(total_MK.dtype)
        baseline_MN = mean_of_others(total_MK, acted_N.expand(rows, rows))
        mean_N = (baseline_MN * acted_N[:, None]).sum(0) / acted_N.sum().clamp(min=1)
        differences.append(baseline_MN.diagonal() - mean_N)
    return keep_masked(torch.stack(differences, dim=1), acted_NA).detach()


def mean_of_others(x_MN: Tensor, acted_MN: Tensor) -> Tensor:
    """Return, for each entry, the mean of the other entries of its row that are 1 in `acted_MN`. The mean is 0 if there are none."""
    x_MN, acted_MN = keep_masked(x_MN, acted_MN), acted_MN.to(x_MN.dtype)
    return (x_MN.sum(1, keepdim=True) - x_MN) / (acted_MN.sum(1, keepdim=True) - acted_MN).clamp(min=1)


def copied(online: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of the tensors of a network, from which a target network starts."""
    return {name: tensor.detach().clone() for name, tensor in online.items()}


def soft_update(
    target: Mapping[str, Tensor], online: Mapping[str, Tensor], *, tau: float
) -> dict[str, Tensor]:
    """Return (1 − τ)·target + τ·online for each tensor; integer tensors are copied from `online`.

    Raises AssertionError if the names differ.
    """
    assert target.keys() == online.keys(), f"names differ: {sorted(target.keys() ^ online.keys())}"
    return {
        name: tensor.detach().lerp(online[name].detach(), tau)
        if tensor.is_floating_point()
        else online[name].detach().clone()
        for name, tensor in target.items()
    }


def periodic_update(
    target: Mapping[str, Tensor], online: Mapping[str, Tensor], *, step: int, period: int
) -> dict[str, Tensor]:
    """Return a copy of the online tensors if `step` is a multiple of `period`, and the target tensors otherwise."""
    assert target.keys() == online.keys(), f"names differ: {sorted(target.keys() ^ online.keys())}"
    return copied(online) if step % period == 0 else dict(target)
