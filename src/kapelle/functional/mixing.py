"""Value decomposition: mixing agents' utilities, crediting agents by them, and target networks.

Shapes: B rows (a round of an episode), A agents, H mixing units. `acted_BA` is 1 where an agent took
its turn; the utility of one that did not is left out of the mix, and its credit is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kapelle.functional.masking import as_float, keep_masked, segment_mean
from kapelle.runtime.on_demand import Tensor, torch


def vdn_mix(utility_BA: Tensor, acted_BA: Tensor) -> Tensor:
    """VDN: Q_tot = Σ_i Q_i over the last axis, [..., A] → [...] (arXiv 1706.05296, eq. 2).

    With values per position in place of utilities it is the token form, Σ_i V_i.
    """
    return keep_masked(utility_BA, acted_BA).sum(dim=-1)


def qmix_mix(
    utility_BA: Tensor, acted_BA: Tensor, w1_BAH: Tensor, b1_BH: Tensor, w2_BH: Tensor, value_B: Tensor
) -> Tensor:
    """QMIX: Q_tot = |W2|·ELU(|W1|·Q + b1) + V → [B], monotone in every Q_i (arXiv 1803.11485, §4.1).

    The weights are what the hypernetworks made of the state, signs included: the absolute value is
    taken here, so that every caller gets it.
    """
    utility_BA = keep_masked(utility_BA, acted_BA)
    hidden_BH = torch.nn.functional.elu(torch.einsum("ba,bah->bh", utility_BA, w1_BAH.abs()) + b1_BH)
    return (hidden_BH * w2_BH.abs()).sum(dim=-1) + value_B


def group_mean_utility(utility_BA: Tensor, acted_BA: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Mean of each agent's utility over the rows of the set in which it acted, given to each row → [B, A]."""
    columns = [
        segment_mean(utility_B, acted_B, group_B, groups)[group_B]
        for utility_B, acted_B in zip(utility_BA.unbind(1), acted_BA.unbind(1), strict=True)
    ]
    return torch.stack(columns, dim=1)


def difference_credit(
    mix: Callable[[Tensor], Tensor], utility_BA: Tensor, acted_BA: Tensor, baseline_BA: Tensor
) -> Tensor:
    """Credit_i = Q_tot(Q) − Q_tot(Q with Q_i replaced by its baseline) → [B, A], detached.

    `mix` maps utilities [B, A] to Q_tot [B] with everything else (state, mask) fixed; the baseline is
    `group_mean_utility`. Zero for an agent whose turn makes no difference; one scale for all agents.
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
    """How much better than its set a row is because of what the others did → [N, A], detached.

    For row n and agent i it is B_n − mean_m B_m over the rows m in which i acted, with B_m the mean of Q_tot of row m over all
    utilities that i had in rows other than n, each in the place of its own, and where the agents that acted after i
    (`after_NAA[m, i, j]` = 1: j's turn may be an effect of i's) are left out. So it is independent of what i did in row n, and
    may be subtracted from a return without changing the expected gradient. A mean of the mix, and not the mix of the mean
    utility, is what the team earns on average whatever i does: where the mix is bent, the two differ by row. `mix` maps
    utilities [K, A], the mask of agents in the mix [K, A], and the rows [K] whose state they are mixed in, to Q_tot [K]. A set of
    one gives 0.
    """
    utility_NA = as_float(utility_NA).detach()
    rows, agents = utility_NA.shape
    row_K = torch.arange(rows, device=utility_NA.device).repeat_interleave(rows)
    differences: list[Tensor] = []
    for i in range(agents):
        # Q_tot of row m with what i did in row k.
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
    """Mean of each row over its entries but each one, of those that are 1 in `acted_MN` → [M, N]; 0 where there are none."""
    x_MN, acted_MN = keep_masked(x_MN, acted_MN), acted_MN.to(x_MN.dtype)
    return (x_MN.sum(1, keepdim=True) - x_MN) / (acted_MN.sum(1, keepdim=True) - acted_MN).clamp(min=1)


def copied(online: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy a network's tensors: the start of a target network."""
    return {name: tensor.detach().clone() for name, tensor in online.items()}


def soft_update(
    target: Mapping[str, Tensor], online: Mapping[str, Tensor], *, tau: float
) -> dict[str, Tensor]:
    """Follow by a step of size τ, (1 − τ)·target + τ·online; tensors of integers are copied.

    Raises AssertionError if the two do not have the same names.
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
    """Copy the online tensors at every step that `period` divides, and keep the target otherwise."""
    assert target.keys() == online.keys(), f"names differ: {sorted(target.keys() ^ online.keys())}"
    return copied(online) if step % period == 0 else dict(target)
