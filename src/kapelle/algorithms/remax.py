"""ReMax: against the greedy rollout (2310.10505), A = R − R of the greedy rollout.

One more episode per task is played with every agent greedy; it is never trained on. A task whose greedy episode
failed has no baseline and is left out of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import by_agent, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.algorithms.shared.rewards import agent_returns
from kapelle.functional.advantages import greedy_baseline
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.on_demand import torch
from kapelle.signals.greedy import GreedyBaseline
from kapelle.types import Group


class ReMax(MonteCarlo):
    """Settings of ReMax."""

    name: Literal["remax"] = "remax"
    group_size: int = Field(default=1, ge=1)
    """Sampled episodes per task; the greedy one is additional."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.row(self.name, self.credit, needs=(GreedyBaseline(),))

    def credit(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return each turn's advantage over its agent's greedy return; an agent without a turn there earned 0."""
        greedy = {
            g: agent_returns(episode, self.team_reward, self.forms) for g, episode in signals.greedy.items()
        }
        members = [member for member in by_agent(groups, self.paying(signals)) if member.place[0] in greedy]
        baseline_B = torch.tensor(
            [greedy[int(g)].get(str(agent), 0.0) for g, agent in (member.place for member in members)],
            dtype=torch.float64,
        )
        own_B = torch.arange(len(members))
        return spread(
            self, groups, compare(members, lambda r_B, _, __: greedy_baseline(r_B, baseline_B, own_B))
        )
