"""RLOO: REINFORCE with a leave-one-out baseline (arXiv:2402.14740).

    A_j = R_j − mean R of the other G − 1 episodes

The baseline of an episode excludes the episode's own return, so the gradient is unbiased. Advantages are not divided by a
standard deviation. If only one episode remains (the others failed, or the agent had no turn in them), it is compared with a
running mean of the agent's earlier returns.

Deviations from the paper:

- The clipped surrogate replaces plain REINFORCE. With `epochs: 1` and `minibatches: 1`, nothing is clipped, and both have the
  same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import LEAVE_ONE_OUT, Earlier, by_agent, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.rows import Signals, TurnKey
from kapelle.types import Group


class RLOO(MonteCarlo):
    """Settings of RLOO, which is REINFORCE with a leave-one-out baseline."""

    name: Literal["rloo"] = "rloo"

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the advantage of each turn: the return R of its agent minus the mean R in the other episodes."""
        members = by_agent(groups, self.rewards(groups, signals))
        return spread(self, groups, compare(members, LEAVE_ONE_OUT, earlier))
