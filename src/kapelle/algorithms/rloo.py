"""RLOO: each attempt against the mean of the others (2402.14740), A_j = R_j − mean of the other G − 1.

Unbiased, as the baseline of an attempt does not contain it; not divided by a std. An attempt that is alone,
after failures or because no other episode had a turn of the agent, is compared with a running mean of the agent's earlier returns.

Deviations from the paper: the clipped surrogate in place of plain REINFORCE. With `epochs: 1` and `minibatches: 1`
nothing is clipped and the gradient is the same.
"""

from __future__ import annotations

from typing import Literal

from kapelle.algorithm import Algorithm
from kapelle.algorithms.shared.groups import LEFT_OUT, by_agent
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, over_sets


class RLOO(MonteCarlo):
    """Settings of REINFORCE with a leave-one-out baseline."""

    name: Literal["rloo"] = "rloo"

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.row(self.name, judge=over_sets(self, by_agent, LEFT_OUT))
