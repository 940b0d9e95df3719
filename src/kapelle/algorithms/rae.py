"""RAE: role-conditioned advantage estimation for self-play (SPIRAL, 2506.24119).

    b ← 0.95·b + 0.05·R,    A = R − b

Each agent has a running mean b of its returns per role and game. With shared weights, b removes from the gradient the
advantage that one role has over another, and differences between the stakes of games. The game is the part of a mixture
(`Task.part`). The role is the agent's name, plus its role in the episode if roles are drawn (`Episode.roles`). The
checkpoint holds the means.

Returns update b in the order of the step's tasks. b already contains R, so A is 0.95·(R − the previous b).

Deviations from the public code:

- The code subtracts the previous b.
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
    """Weight of the previous mean at each new return."""

    def build(self) -> Algorithm:
        """Return the algorithm."""
        return self.row(self.name, None, memory=lambda team, seed: RunningBaselines(self))


class RunningBaselines:
    """Running means of returns per game, agent and role; a `CreditMemory`."""

    def __init__(self, settings: RAE) -> None:
        self._settings = settings
        self._baseline: dict[Place, float] = {}

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return each turn's advantage over its agent's running mean in this game and role, and update the means."""
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
        """Return the key of an agent's running mean: game, agent and role."""
        return place_of(episode, agent)

    def metrics(self) -> Mapping[str, float]:
        """Return every baseline by game (in a mixture), agent and role (if roles are drawn)."""
        return {
            "/".join(["baseline", *filter(None, place)]): value for place, value in self._baseline.items()
        }

    def state(self) -> dict[str, object]:
        """Return the baselines."""
        rows = [[*place, value] for place, value in self._baseline.items()]
        return {"baselines": rows}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        rows: Sequence[tuple[str, str, str, float]] = state["baselines"]
        self._baseline = {(part, agent, role): value for part, agent, role, value in rows}
