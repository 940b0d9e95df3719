"""RAE: role-conditioned advantage estimation for self-play (SPIRAL, arXiv:2506.24119).

    b ← 0.95·b + 0.05·R,    A = R − b

Each agent has a running mean b of its returns per role and game. If roles share weights, b removes two differences from the
gradient: the advantage of one role over another, and the difference between the stakes of games. The game is the part of a
mixture (`Task.part`). The role is the agent's name, plus its role in the episode if roles are drawn at random
(`Episode.roles`). The running means are stored in the checkpoint.

Returns update b in the order of the tasks of the step. R is already included in b, so A is 0.95·(R − the previous b).

Deviations from the public code:

- The public code subtracts the previous b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import Member, Place, by_agent, place_of
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.algorithms.shared.rewards import TeamReward
from kapelle.functional.advantages import running_baseline
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.on_demand import torch
from kapelle.types import Episode, Group


class RAE(MonteCarlo):
    """Settings of RAE: role-conditioned advantage estimation."""

    name: Literal["rae"] = "rae"
    group_size: int = Field(default=1, ge=1)
    team_reward: TeamReward = "individual"
    decay: float = Field(default=0.95, ge=0.0, lt=1.0)
    """The weight of the previous mean when a new return updates the running mean."""

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return self.row(self.name, None, memory=lambda team, seed: RunningBaselines(self))


class RunningBaselines:
    """A `CreditMemory` that stores running means of returns per game, agent and role."""

    def __init__(self, settings: RAE) -> None:
        self._settings = settings
        self._baseline: dict[Place, float] = {}

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return the advantage of each turn over the running mean of its agent in this game and role, and update the running means."""
        places: dict[Place, list[Member]] = {}
        for member in by_agent(groups, self._settings.rewards(groups, signals)):
            g, e, _ = member.keys[0]
            place = self.place(groups[g].episodes[e], str(member.place[1]))
            places.setdefault(place, []).append(member)
        advantage: dict[TurnKey, float] = {}
        for place, own in places.items():
            returns_B = torch.tensor([member.value for member in own], dtype=torch.float64)
            before = torch.tensor(self._baseline.get(place, 0.0), dtype=torch.float64)
            moved = running_baseline(returns_B, before, decay=self._settings.decay)
            self._baseline[place] = float(moved.baseline)
            for member, value in zip(own, moved.advantage_B.tolist(), strict=True):
                advantage |= dict.fromkeys(member.keys, value)
        return self._settings.umad.gain(groups, spread(self._settings, groups, advantage))

    def place(self, episode: Episode, agent: str) -> Place:
        """Return the key of the running mean of an agent: game, agent and role."""
        return place_of(episode, agent)

    def metrics(self) -> Mapping[str, float]:
        """Return every running mean as a metric, named by game (in a mixture), agent and role (if roles are drawn at random)."""
        return {
            "/".join(["baseline", *filter(None, place)]): value for place, value in self._baseline.items()
        }

    def state(self) -> dict[str, object]:
        """Return the running means for the checkpoint."""
        rows = [[*place, value] for place, value in self._baseline.items()]
        return {"baselines": rows}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that a call of `state` returned."""
        rows: Sequence[tuple[str, str, str, float]] = state["baselines"]
        self._baseline = {(part, agent, role): value for part, agent, role, value in rows}
