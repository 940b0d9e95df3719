"""Two small games in PettingZoo's own classes: taking sticks in turn, and matching a number at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv


class Sticks(AECEnv):  # type: ignore[misc]
    """Players take one or two of the sticks in turn; who takes the last one wins."""

    metadata = {"name": "sticks"}  # noqa: RUF012 - as the base class has it

    def __init__(self, sticks: int = 3, limit: int = 100) -> None:
        super().__init__()
        self.possible_agents = ["one", "two"]
        self._sticks = sticks
        self._limit = limit

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2, start=1)

    def observation_space(self, agent: str) -> Any:
        return spaces.Dict({})

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = self.possible_agents[:]
        self.left = self._sticks
        self.moves = 0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.agent_selection = "one"

    def observe(self, agent: str) -> dict[str, Any]:
        return {"observation": np.array([self.left]), "action_mask": np.array([1, int(self.left > 1)])}

    def step(self, action: int | None) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        assert action is not None
        self.left -= action
        self.moves += 1
        other = "two" if agent == "one" else "one"
        if self.left == 0:
            self.rewards = {agent: 1.0, other: -1.0}
            self.terminations = dict.fromkeys(self.agents, True)
        self.truncations = dict.fromkeys(self.agents, self.moves >= self._limit)
        self.agent_selection = other


class Match(ParallelEnv):  # type: ignore[misc]
    """Both choose 0 or 1, twice; an equal choice rewards each with 0.5."""

    metadata = {"name": "match"}  # noqa: RUF012 - as the base class has it

    def __init__(self, limit: int = 2) -> None:
        self.possible_agents = ["left", "right"]
        self._limit = limit

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1, (2,))

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.agents = self.possible_agents[:]
        self.round = 0
        return self._seen([0, 0]), {agent: {} for agent in self.agents}

    def _seen(self, chosen: list[int]) -> dict[str, Any]:
        return {agent: np.array([[self.round, 2], chosen]) for agent in self.possible_agents}

    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        self.round += 1
        reward = 0.5 * (actions["left"] == actions["right"])
        over, cut = self.round == 2, self.round >= self._limit
        agents = self.agents
        self.agents = [] if over or cut else agents
        ended, stopped = dict.fromkeys(agents, over), dict.fromkeys(agents, cut)
        infos: dict[str, dict[str, Any]] = {agent: {} for agent in agents}
        return self._seen(list(actions.values())), dict.fromkeys(agents, reward), ended, stopped, infos


env = Sticks
parallel_env = Match
