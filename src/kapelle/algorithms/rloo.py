"""RLOO: each attempt against the mean of the others (2402.14740), A_j = R_j − mean of the other G − 1.

Unbiased, as the baseline of an attempt does not contain it; not divided by a std. An attempt that is alone,
after failures or because no other episode had a turn of the agent, is compared with a running mean of the agent's earlier returns.

Deviations from the paper: the clipped surrogate in place of plain REINFORCE. With `epochs: 1` and `minibatches: 1`
nothing is clipped and the gradient is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import LEFT_OUT, Earlier, by_agent, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.rows import Signals, TurnKey
from kapelle.types import Group


class RLOO(MonteCarlo):
    """Settings of REINFORCE with a leave-one-out baseline."""

    name: Literal["rloo"] = "rloo"

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return A = R − mean of the other attempts' R."""
        members = by_agent(groups, self.rewards(groups, signals))
        return spread(self, groups, compare(members, LEFT_OUT, earlier))
