"""OPO: a group baseline that is weighted by completion length (arXiv:2505.23585).

The baseline has the least variance if longer completions have noisier gradients.

    A = R − Σ len·R / Σ len

The sums run over the agent's trajectories in the group, with lengths in tokens. Training is on-policy, with one update per
batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import Comparison, Earlier, by_agent, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.functional.advantages import length_weighted_baseline
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.on_demand import torch
from kapelle.types import Group


class OPO(MonteCarlo):
    """Settings of OPO: on-policy RL with a length-weighted baseline."""

    name: Literal["opo"] = "opo"

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return, for each turn, the return of its agent minus the length-weighted mean of the agent's returns for the task."""
        members = by_agent(groups, self.rewards(groups, signals))
        length_B = torch.tensor([member.tokens for member in members])
        how = Comparison(lambda r_B, g_B, n: length_weighted_baseline(r_B, length_B, g_B, n), resized=True)
        return spread(self, groups, compare(members, how, earlier))
