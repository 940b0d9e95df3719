"""VDN: the team's value is the sum of its agents' utilities (1706.05296).

Q_tot = Σ_i Q_i(saw_i, said_i), fitted to the team's return; `credit_mixer.py` describes how credit follows from it. With
the credit `difference` an agent is paid the return less w·Σ_j Q_j of the others, with `modelled` Q_i − mean Q_i over the
episodes of the task. What is not additive in the return is split evenly, as the least-squares sum has it.

Deviations from the paper: utilities judge turns and choose none, so nothing is maximised over actions; Monte Carlo
returns by default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kapelle.algorithm import Algorithm
from kapelle.algorithms.value_decomposition import mixer_row
from kapelle.algorithms.value_decomposition.settings import CreditMixer

if TYPE_CHECKING:
    from torch.nn import Module


class VDN(CreditMixer):
    """Settings of value decomposition by a sum."""

    name: Literal["vdn"] = "vdn"

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return mixer_row(self, self.name, _sum)


def _sum(width: int, agents: int) -> Module:
    from kapelle.algorithms.value_decomposition.mixer_fit import SumMixer

    return SumMixer()
