"""ReMax: REINFORCE with the return of a greedy rollout as the baseline (arXiv:2310.10505).

    A = R − R of the greedy rollout

For each task, one additional episode is sampled in which every agent decodes greedily; it is never trained on. If the greedy
episode of a task fails, the task has no baseline and is excluded from the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import Earlier, against_earlier, by_agent
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.algorithms.shared.rewards import agent_returns
from kapelle.algorithms.signals.greedy import GreedyBaseline
from kapelle.rows import Signals, TurnKey
from kapelle.types import Group


class ReMax(MonteCarlo):
    """Settings of ReMax, which is REINFORCE with a greedy baseline."""

    name: Literal["remax"] = "remax"
    group_size: int = Field(default=1, ge=1)
    """The number of sampled episodes per task, not counting the greedy episode."""

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return self.row(self.name, judge=self.credit, needs=(GreedyBaseline(),))

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the advantage of each turn over the return of its agent in the greedy episode.

        If an agent has no turn in the greedy episode, its returns are compared with its returns in earlier steps.
        """
        greedy = {
            g: agent_returns(episode, self.team_reward, self.forms) for g, episode in signals.greedy.items()
        }
        members = [
            member for member in by_agent(groups, self.rewards(groups, signals)) if member.place[0] in greedy
        ]
        baseline = [greedy[int(g)].get(str(agent)) for g, agent in (member.place for member in members)]
        without = [member for member, known in zip(members, baseline, strict=True) if known is None]
        earlier = earlier or Earlier()
        found = iter(against_earlier(without, members, earlier))
        advantage: dict[TurnKey, float] = {}
        for member, known in zip(members, baseline, strict=True):
            difference = next(found) if known is None else member.value - known
            advantage |= dict.fromkeys(member.keys, difference)
        earlier.take_in(members)
        return spread(self, groups, advantage)
