"""VDN: credit from a decomposition of the team's value into a sum of the agents' utilities (1706.05296).

    Q_tot = Σ_i Q_i(saw_i, said_i)

Q_tot is fitted to the team's return; `credit_mixer.py` describes how credit follows from it. With `credit: difference`, an
agent's advantage uses the return minus w·Σ_j Q_j of the other agents. With `modelled` it is Q_i minus the mean Q_i over the task's
episodes. The part of the return that is not additive is split evenly, as in the least-squares sum.

Deviations from the paper:

- Utilities evaluate turns and do not choose them, so there is no maximum over actions.
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
    """Settings of VDN: value decomposition by a sum."""

    name: Literal["vdn"] = "vdn"

    def build(self) -> Algorithm:
        """Return the algorithm."""
        return mixer_row(self, self.name, _sum)


def _sum(width: int, agents: int) -> Module:
    from kapelle.algorithms.value_decomposition.mixer_fit import SumMixer

    return SumMixer()
