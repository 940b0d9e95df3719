"""RAE: role-conditioned advantage estimation for self-play (SPIRAL, 2506.24119).

Each agent, which is a role in the game, keeps a running mean of its returns: b ← 0.95·b + 0.05·R, A = R − b. With
shared weights it takes the advantage of one seat over another out of the gradient. The means are in the checkpoint.

Returns are taken in the order of the step's tasks. As b holds R already, A is 0.95·(R − the b before); the public
code subtracts the b before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from pydantic import Field

from kapelle.algorithm import Algorithm, Credit, Estimates, TurnKey
from kapelle.algorithms.groups import by_agent
from kapelle.algorithms.monte_carlo import MonteCarlo, spread
from kapelle.algorithms.rewards import TeamReward
from kapelle.functional.advantages import running_baseline
from kapelle.team import Team
from kapelle.types import Group


class RAE(MonteCarlo):
    """Settings of role-conditioned advantage estimation."""

    name: Literal["rae"] = "rae"
    group_size: int = Field(1, ge=1)
    team_reward: TeamReward = "individual"
    decay: float = Field(0.95, ge=0.0, lt=1.0)

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.row(self.name, None, memory=self.remember)

    def remember(self, team: Team, seed: int) -> RunningBaselines:
        """Return fresh baselines."""
        return RunningBaselines(self)


class RunningBaselines:
    """A running mean of returns for each agent; a `CreditMemory`."""

    def __init__(self, settings: RAE) -> None:
        self._settings = settings
        self._baseline: dict[str, float] = {}

    def __call__(self, groups: Sequence[Group], estimates: Estimates) -> Mapping[TurnKey, Credit]:
        """Return each turn's advantage over its agent's mean so far, and move the means."""
        members = by_agent(groups, self._settings.paying(estimates))
        advantage: dict[TurnKey, float] = {}
        for agent in dict.fromkeys(str(member.place[1]) for member in members):
            own = [member for member in members if member.place[1] == agent]
            returns_B = torch.tensor([member.value for member in own], dtype=torch.float64)
            before = torch.tensor(self._baseline.get(agent, 0.0), dtype=torch.float64)
            moved = running_baseline(returns_B, before, decay=self._settings.decay)
            self._baseline[agent] = float(moved.baseline)
            for member, value in zip(own, moved.advantage_B.tolist(), strict=True):
                advantage |= dict.fromkeys(member.keys, value)
        return self._settings.umad.gain(groups, spread(self._settings, groups, advantage))

    def metrics(self) -> Mapping[str, float]:
        """Return each agent's baseline."""
        return {f"baseline/{agent}": value for agent, value in self._baseline.items()}

    def state(self) -> dict[str, object]:
        """Return the baselines."""
        return {"baseline": dict(self._baseline)}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Take what `state` returned."""
        self._baseline = dict(cast("Mapping[str, Any]", state["baseline"]))
