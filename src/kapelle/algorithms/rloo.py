"""RLOO: REINFORCE with a leave-one-out baseline (2402.14740).

    A_j = R_j − mean R of the other G − 1 episodes

The baseline of an episode excludes the episode's own return, so the gradient is unbiased. There is no division by a
standard deviation. A lone episode (the others failed, or the agent had no turn in them) is compared with a running mean of
the agent's earlier returns.

Deviations from the paper:

- The clipped surrogate replaces plain REINFORCE. With `epochs: 1` and `minibatches: 1` nothing is clipped, and the gradients
  are equal.
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
    """Settings of RLOO: REINFORCE with a leave-one-out baseline."""

    name: Literal["rloo"] = "rloo"

    def build(self) -> Algorithm:
        """Return the algorithm."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return A = R − mean R of the other episodes."""
        members = by_agent(groups, self.rewards(groups, signals))
        return spread(self, groups, compare(members, LEAVE_ONE_OUT, earlier))
