"""VDN: credit from a decomposition of the team's value into a sum of the agents' utilities (arXiv:1706.05296).

    Q_tot = Σ_i Q_i(saw_i, said_i)

Q_tot is fitted to the team's return. The module `credit_mixer.py` describes how credit follows from Q_tot. With `credit:
difference`, the advantage of agent i is computed from the return minus w·Σ_j Q_j over the other agents j. With `credit:
modelled`, the advantage is Q_i minus the mean Q_i over the episodes of the task. The part of the return that is not additive
is split evenly, as in a least-squares fit of a sum.

Deviations from the paper:

- Utilities only evaluate turns and do not select actions, so there is no maximum over actions.
- The targets are Monte Carlo returns by default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kapelle.algorithm import Algorithm
from kapelle.algorithms.value_decomposition import mixer_row
from kapelle.algorithms.value_decomposition.settings import CreditMixer

if TYPE_CHECKING:
    from torch.nn import Module


class VDN(CreditMixer):
    """Settings of VDN: decomposition of the team's value into a sum."""

    name: Literal["vdn"] = "vdn"

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return mixer_row(self, self.name, _sum)


def _sum(width: int, agents: int) -> Module:
    from kapelle.algorithms.value_decomposition.mixer_fit import SumMixer

    return SumMixer()
