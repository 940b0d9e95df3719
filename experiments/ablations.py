"""Arms that no recipe should use: algorithms without the very piece that a claim is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import Earlier, by_agent
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.rows import Signals, TurnKey
from kapelle.types import Group


class Plain(MonteCarlo):
    """REINFORCE: an agent's return, less the batch's mean or less nothing, in place of GRPO's comparison within a group."""

    name: Literal["experiments.ablations:Plain"] = "experiments.ablations:Plain"
    baseline: Literal["none", "batch"] = "none"

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return A = R, or R less the mean of the agent's returns in the batch."""
        members = by_agent(groups, self.rewards(groups, signals))
        advantage: dict[TurnKey, float] = {}
        agents = [
            groups[member.keys[0].group].episodes[member.keys[0].episode].turns[member.keys[0].turn].agent
            for member in members
        ]
        for agent in dict.fromkeys(agents):
            own = [member for member, its in zip(members, agents, strict=True) if its == agent]
            mean = fmean(member.value for member in own) if self.baseline == "batch" else 0.0
            advantage |= {key: member.value - mean for member in own for key in member.keys}
        return spread(self, groups, advantage)
