"""ReMax: REINFORCE with the greedy rollout's return as the baseline (2310.10505).

    A = R − R of the greedy rollout

Each task gets one more episode with greedy sampling of every agent, which is never trained on. A task whose greedy episode
failed has no baseline, and the step excludes it.
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
    """Settings of ReMax."""

    name: Literal["remax"] = "remax"
    group_size: int = Field(default=1, ge=1)
    """Sampled episodes per task; the greedy one is additional."""

    def build(self) -> Algorithm:
        """Return the algorithm."""
        return self.row(self.name, judge=self.credit, needs=(GreedyBaseline(),))

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return each turn's advantage over its agent's greedy return.

        An agent without a turn in the greedy episode is compared with its earlier returns.
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
