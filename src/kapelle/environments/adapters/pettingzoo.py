"""Adapter for PettingZoo environments (arXiv:2009.14471), in which agents move in turn (AEC) or simultaneously (Parallel)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, FiniteFloat

from kapelle.environment import KnowsMoves, ListsMoves, Outcome
from kapelle.environments.adapters.gymnasium import (
    actions_text,
    legal_numbers,
    observation_text,
    random_action,
    read_action,
)
from kapelle.environments.adapters.plain import make_own
from kapelle.environments.base import GameSettings, need_movers
from kapelle.errors import AbsentPackage, ConfigError, did_you_mean
from kapelle.runtime.plugins import find_module, split_target
from kapelle.types import Json, Split, Task


class PettingZoo(GameSettings, ListsMoves):
    """A PettingZoo environment. The agents of the team are its players, in order, and write actions as numbers."""

    name: Literal["pettingzoo"] = "pettingzoo"
    path: str
    """A module that defines `env()` or `parallel_env()`, such as `pettingzoo.classic.tictactoe_v3` or `./mine.py`; or a class or
    function in a module, such as `mine:Env` or `./mine.py:Env`."""
    turns: Literal["aec", "parallel"] = "aec"
    """The function of the module that creates the environment. The value `aec` calls `env()`, and `parallel` calls `parallel_env()`."""
    arguments: Mapping[str, Json] = Field(default={})
    """Keyword arguments for the function or class that creates the environment."""
    rewards: tuple[FiniteFloat, FiniteFloat] = (-1.0, 1.0)
    """The minimum and maximum total reward of one agent, before penalties. The episode fails if a total is outside this range."""
    penalty: FiniteFloat = Field(default=-1.0, le=0.0)
    """The penalty that is added to the reward when an agent writes an illegal action. A random legal action replaces the illegal
    action."""
    max_rounds: int = Field(default=100, ge=1)
    """The maximum number of rounds per episode."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The range of `rewards`, with the minimum lowered by one penalty per round."""
        return (self.rewards[0] + self.penalty * self.max_rounds, self.rewards[1])

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the train and test episodes. The two splits use different seeds."""
        return {
            "train": f"episodes of {self.path}, by seed",
            "test": f"episodes of {self.path}, with different seeds",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if the package or module is missing, the number of agents is wrong or actions cannot be written as text."""
        made = self._make()
        try:
            players = made.possible_agents
            if len(players) != len(agents):
                raise ConfigError(
                    f"{self.path} has {len(players)} players, but the team has {len(agents)} agents ({', '.join(agents)}). "
                    f"Set `team.agents` to {len(players)} agents."
                )
            for player in players:
                legal_numbers(made.action_space(player), None)
        except TypeError as error:
            raise ConfigError(
                f"environment.path {self.path}: {error}. Choose another environment, or wrap this one."
            ) from error
        finally:
            made.close()

    def _make(self) -> Any:
        module_name, attribute = split_target(self.path)
        what = f"environment.path: {self.path}"
        try:
            module = find_module(module_name, what, attribute)
        except ConfigError as error:
            missing = getattr(error.__cause__, "name", "") == "pettingzoo"
            if not missing and not self.path.startswith("pettingzoo."):
                raise
            raise AbsentPackage(
                f"{error} Install PettingZoo with `pip install 'kapelle[games]'`, and the extra for the game's family, "
                "such as `pettingzoo[classic]`."
            ) from error
        function = attribute or {"aec": "env", "parallel": "parallel_env"}[self.turns]
        if function not in vars(module):
            known = [word for word in vars(module) if not word.startswith("_")]
            raise ConfigError(
                f"{module_name} has no `{function}`.{did_you_mean(function, known)} Change `environment.path` or "
                f"`environment.turns`. To use a class, write `{module_name}:Class`."
            )
        return make_own(vars(module)[function], self.arguments, what, "possible_agents")

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ZooState:
        """Create the environment for one episode and return the episode's state."""
        from pettingzoo import AECEnv, ParallelEnv

        made = self._make()
        # If a class is named, the class determines the order of moves, and `turns` has no effect.
        in_turn = isinstance(made, AECEnv) or (self.turns == "aec" and not isinstance(made, ParallelEnv))
        order = (_InTurn if in_turn else _AtOnce)(made, seed % 2**31)
        return ZooState(order, agents, self, seed)


ZOO_RULES: Mapping[str, str] = {
    "tictactoe_v3": (
        "Tic-tac-toe: three of one's own in a row, a column or a diagonal win. An action is a cell: 0, 1, 2 from top to bottom "
        "in the first column, 3, 4, 5 in the second, 6, 7, 8 in the third. Each cell is shown as two numbers: whether it is "
        "yours, and whether it is the other's."
    ),
    "connect_four_v3": (
        "Connect four on 6 rows and 7 columns: four of one's own in a line, straight or diagonal, win. An action is a column, "
        "from 0, in which the piece falls to the lowest free cell. Each cell is shown as two numbers: whether it is yours, "
        "and whether it is the other's."
    ),
}
"""Mapping from the name of a game in its metadata (`metadata["name"]`) to its rules, which are taken from the documentation of the
game."""


class _InTurn:
    """A PettingZoo environment in which players move one at a time (AEC)."""

    def __init__(self, made: Any, seed: int) -> None:
        self.made = made
        self.cut = False
        made.reset(seed=seed)
        self._skip_finished()

    def movers(self) -> list[str]:
        return [self.made.agent_selection] if self.made.agents else []

    def observe(self, player: str) -> tuple[Any, Mapping[str, Any]]:
        return self.made.observe(player), self.made.infos.get(player, {})

    def move(self, actions: Mapping[str, int]) -> Mapping[str, float]:
        """Apply the current player's action and return the rewards of all players."""
        self.made.step(next(iter(actions.values())))
        rewards = {player: float(reward) for player, reward in self.made.rewards.items()}
        self._skip_finished()
        return rewards

    def _skip_finished(self) -> None:
        """Step past players whose game has ended. PettingZoo removes such players from the environment."""
        made = self.made
        while made.agents and (
            made.terminations[made.agent_selection] or made.truncations[made.agent_selection]
        ):
            self.cut = self.cut or not made.terminations[made.agent_selection]
            made.step(None)


class _AtOnce:
    """A PettingZoo environment in which all players move simultaneously (Parallel)."""

    def __init__(self, made: Any, seed: int) -> None:
        self.made = made
        self.cut = False
        self._seen, self._infos = made.reset(seed=seed)

    def movers(self) -> list[str]:
        return list(self.made.agents)

    def observe(self, player: str) -> tuple[Any, Mapping[str, Any]]:
        return self._seen.get(player, ""), self._infos.get(player, {})

    def move(self, actions: Mapping[str, int]) -> Mapping[str, float]:
        """Apply the actions of all players and return the rewards of all players."""
        self._seen, rewards, ended, cut, self._infos = self.made.step(dict(actions))
        self.cut = self.cut or any(cut[player] and not ended[player] for player in cut)
        return {player: float(reward) for player, reward in rewards.items()}


class ZooState(KnowsMoves):
    """The state of one episode. A reward that an agent receives before its first move is added to the reward of that move."""

    def __init__(
        self, order: _InTurn | _AtOnce, agents: Sequence[str], settings: PettingZoo, seed: int
    ) -> None:
        self._order = order
        self._move_in = settings.move_in
        # Known games have their rules here. Any other game is described by one line, to which `rules` can add more.
        name, players = (
            str((order.made.metadata or {}).get("name", "a game")),
            len(order.made.possible_agents),
        )
        unknown = f"{name}, a game for {players} players. Take one of the legal actions, by its number."
        self._head = settings.head(ZOO_RULES.get(name, unknown), "")
        self._player = dict(zip(agents, order.made.possible_agents, strict=True))
        self._agent = {player: agent for agent, player in self._player.items()}
        self._penalty = settings.penalty
        self._left = settings.max_rounds
        self._fallback = random.Random(f"{seed}/invalid")
        self._unpaid = dict.fromkeys(agents, 0.0)
        self._moved: set[str] = set()
        self._invalid = dict.fromkeys(agents, 0)

    def observe(self, agent: str) -> str:
        """Return the player's observation. If the player may move, the observation lists its legal actions."""
        player = self._player[agent]
        seen, _ = self._order.observe(player)
        legal = self._legal(player) if player in self._order.movers() else None
        return "\n".join(part for part in (self._head, observation_text(seen), actions_text(legal)) if part)

    def legal(self, agent: str) -> Sequence[str]:
        """Return the numbers of the player's legal actions. The result is empty if the player may not move or actions are strings."""
        numbers = self._legal(self._player[agent]) if agent in self.movers() else None
        return [str(number) for number in numbers or ()]

    def _legal(self, player: str) -> list[int] | None:
        seen, info = self._order.observe(player)
        mask = seen.get("action_mask") if isinstance(seen, Mapping) else None
        return legal_numbers(
            self._order.made.action_space(player), mask if mask is not None else info.get("action_mask")
        )

    def movers(self) -> tuple[str, ...]:
        """Return the agents that may move, or an empty tuple if the episode has ended or has reached the maximum number of rounds."""
        return tuple(self._agent[player] for player in self._order.movers()) if self._left else ()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Apply the actions and return the rewards of all agents that have moved so far in the episode.

        Raises EpisodeError if the agents that act are not exactly the agents that may move.
        """
        need_movers(actions, self.movers())
        self._left -= 1
        chosen: dict[str, Any] = {}
        for agent, text in actions.items():
            player, move = self._player[agent], self._move_in(text)
            legal, space = self._legal(player), self._order.made.action_space(player)
            action = None if move is None else read_action(move, space, legal)
            if action is None:
                self._unpaid[agent] += self._penalty
                self._invalid[agent] += 1
                action = random_action(space, legal, self._fallback)
            chosen[player] = action
        for player, reward in self._order.move(chosen).items():
            self._unpaid[self._agent[player]] += reward
        self._moved.update(actions)
        rewards = {agent: self._unpaid[agent] for agent in self._unpaid if agent in self._moved}
        self._unpaid.update(dict.fromkeys(rewards, 0.0))
        return rewards

    def outcome(self) -> Outcome:
        """Return the outcome with the rewards that have not been given yet.

        The outcome is `truncated` if the episode reached a limit on rounds.
        """
        cut = self._order.cut or bool(self._order.movers())
        return Outcome(dict(self._unpaid), None, {"invalid": dict(self._invalid)}, truncated=cut)

    async def close(self) -> None:
        """Close the PettingZoo environment."""
        self._order.made.close()
