"""PettingZoo environments (2009.14471) of both kinds: agents in turn (AEC), or all at once (Parallel)."""

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
    """An environment by its module; agents take its seats in order and write actions as numbers."""

    name: Literal["pettingzoo"] = "pettingzoo"
    path: str
    """Module with `env()` or `parallel_env()`, such as `pettingzoo.classic.tictactoe_v3` or `./mine.py`, or a class or function in it:
    `mine:Env`, `./mine.py:Env`."""
    turns: Literal["aec", "parallel"] = "aec"
    """Which of the two the module is asked for."""
    arguments: Mapping[str, Json] = Field(default={})
    """Keyword arguments of that function."""
    rewards: tuple[FiniteFloat, FiniteFloat] = (-1.0, 1.0)
    """Least and greatest total of one agent before penalties; a total outside this range fails the episode."""
    penalty: FiniteFloat = Field(default=-1.0, le=0.0)
    """Cost of an illegal action, which is replaced by a random legal one."""
    max_rounds: int = Field(default=100, ge=1)
    """Most rounds of an episode."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The range of `rewards`, less the penalty of every move."""
        return (self.rewards[0] + self.penalty * self.max_rounds, self.rewards[1])

    @property
    def sources(self) -> Mapping[Split, str]:
        """The environment itself; only the seeds differ."""
        return {"train": f"episodes of {self.path}, by seed", "test": f"episodes of {self.path}, other seeds"}

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError for a missing package or module, another number of agents, or actions that cannot be written as text."""
        made = self._make()
        try:
            players = made.possible_agents
            if len(players) != len(agents):
                raise ConfigError(
                    f"{self.path} has {len(players)} players and the team {len(agents)} agents ({', '.join(agents)}). "
                    f"Set `team.agents` to {len(players)}."
                )
            for player in players:
                legal_numbers(made.action_space(player), None)
        except TypeError as error:
            raise ConfigError(f"environment.path {self.path}: {error}. Take another, or wrap it.") from error
        finally:
            made.close()

    def _make(self) -> Any:
        module_name, attribute = split_target(self.path)
        try:
            module = find_module(module_name, f"environment.path: {self.path}", attribute)
        except ConfigError as error:
            if (
                not self.path.startswith("pettingzoo.")
                and getattr(error.__cause__, "name", "") != "pettingzoo"
            ):
                raise
            raise AbsentPackage(
                f"{error} PettingZoo comes with `pip install 'kapelle[games]'`, its families with extras of their own "
                "(`pettingzoo[classic]`)."
            ) from error
        function = attribute or {"aec": "env", "parallel": "parallel_env"}[self.turns]
        if function not in vars(module):
            known = [word for word in vars(module) if not word.startswith("_")]
            raise ConfigError(
                f"{module_name} has no `{function}`.{did_you_mean(function, known)} Set another `environment.path` or "
                f"`environment.turns`; a class is named as `{module_name}:Class`."
            )
        what = f"environment.path: {self.path}"
        return make_own(vars(module)[function], self.arguments, what, "possible_agents")

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ZooWorld:
        """Make the environment of one episode."""
        from pettingzoo import AECEnv, ParallelEnv

        made = self._make()
        # A class that `path` names is of the kind that it is, whatever `turns` says.
        in_turn = isinstance(made, AECEnv) or (self.turns == "aec" and not isinstance(made, ParallelEnv))
        turns = (_InTurn if in_turn else _AtOnce)(made, seed % 2**31)
        return ZooWorld(turns, agents, self, seed)


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
"""Rules by the name that an environment gives itself, as its documentation states them."""


class _InTurn:
    """One player moves at a time."""

    def __init__(self, made: Any, seed: int) -> None:
        self.made = made
        self.cut = False
        made.reset(seed=seed)
        self._bury()

    def movers(self) -> list[str]:
        return [self.made.agent_selection] if self.made.agents else []

    def observe(self, player: str) -> tuple[Any, Mapping[str, Any]]:
        return self.made.observe(player), self.made.infos.get(player, {})

    def move(self, actions: Mapping[str, int]) -> Mapping[str, float]:
        """Move and return what everybody was paid for it."""
        self.made.step(next(iter(actions.values())))
        paid = {player: float(reward) for player, reward in self.made.rewards.items()}
        self._bury()
        return paid

    def _bury(self) -> None:
        """Step players that are out once more, without effect, and take them from the list."""
        made = self.made
        while made.agents and (
            made.terminations[made.agent_selection] or made.truncations[made.agent_selection]
        ):
            self.cut = self.cut or not made.terminations[made.agent_selection]
            made.step(None)


class _AtOnce:
    """All players move at the same moment."""

    def __init__(self, made: Any, seed: int) -> None:
        self.made = made
        self.cut = False
        self._seen, self._infos = made.reset(seed=seed)

    def movers(self) -> list[str]:
        return list(self.made.agents)

    def observe(self, player: str) -> tuple[Any, Mapping[str, Any]]:
        return self._seen.get(player, ""), self._infos.get(player, {})

    def move(self, actions: Mapping[str, int]) -> Mapping[str, float]:
        """Move and return what everybody was paid for it."""
        self._seen, rewards, ended, cut, self._infos = self.made.step(dict(actions))
        self.cut = self.cut or any(cut[player] and not ended[player] for player in cut)
        return {player: float(reward) for player, reward in rewards.items()}


class ZooWorld(KnowsMoves):
    """One episode; an agent that earns something before it has spoken is paid at its first move."""

    def __init__(
        self, turns: _InTurn | _AtOnce, agents: Sequence[str], settings: PettingZoo, seed: int
    ) -> None:
        self._turns = turns
        self._move_in = settings.move_in
        # The rules of an environment that is known, else its name and its players; the rest is the user's to say.
        name, players = (
            str((turns.made.metadata or {}).get("name", "a game")),
            len(turns.made.possible_agents),
        )
        unknown = f"{name}, a game for {players} players. Take one of the legal actions, by its number."
        self._told = settings.head(ZOO_RULES.get(name, unknown), "")
        self._player = dict(zip(agents, turns.made.possible_agents, strict=True))
        self._agent = {player: agent for agent, player in self._player.items()}
        self._penalty = settings.penalty
        self._left = settings.max_rounds
        self._fallback = random.Random(f"{seed}/invalid")
        self._owed = dict.fromkeys(agents, 0.0)
        self._acted: set[str] = set()
        self._invalid = dict.fromkeys(agents, 0)

    def observe(self, agent: str) -> str:
        """Return what the player sees, and its legal actions when it is to move."""
        player = self._player[agent]
        seen, _ = self._turns.observe(player)
        legal = self._legal(player) if player in self._turns.movers() else None
        return "\n".join(part for part in (self._told, observation_text(seen), actions_text(legal)) if part)

    def legal(self, agent: str) -> Sequence[str]:
        """Return the numbers of the player's legal actions; none where actions are no numbers."""
        numbers = self._legal(self._player[agent]) if agent in self.movers() else None
        return [str(number) for number in numbers or ()]

    def _legal(self, player: str) -> list[int] | None:
        seen, info = self._turns.observe(player)
        mask = seen.get("action_mask") if isinstance(seen, Mapping) else None
        return legal_numbers(
            self._turns.made.action_space(player), mask if mask is not None else info.get("action_mask")
        )

    def movers(self) -> tuple[str, ...]:
        """Return the agents to move; empty when the episode is over or all rounds are used."""
        return tuple(self._agent[player] for player in self._turns.movers()) if self._left else ()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Move; return what those who have spoken earned. EpisodeError unless exactly the movers moved."""
        need_movers(actions, self.movers())
        self._left -= 1
        chosen: dict[str, Any] = {}
        for agent, text in actions.items():
            player, said = self._player[agent], self._move_in(text)
            legal, space = self._legal(player), self._turns.made.action_space(player)
            action = None if said is None else read_action(said, space, legal)
            if action is None:
                self._owed[agent] += self._penalty
                self._invalid[agent] += 1
                action = random_action(space, legal, self._fallback)
            chosen[player] = action
        for player, reward in self._turns.move(chosen).items():
            self._owed[self._agent[player]] += reward
        self._acted.update(actions)
        paid = {agent: self._owed[agent] for agent in self._owed if agent in self._acted}
        self._owed.update(dict.fromkeys(paid, 0.0))
        return paid

    def outcome(self) -> Outcome:
        """Return what is left to pay; `truncated` where a limit of rounds ended it, ours or the environment's own."""
        cut = self._turns.cut or bool(self._turns.movers())
        return Outcome(dict(self._owed), None, {"invalid": dict(self._invalid)}, truncated=cut)

    async def close(self) -> None:
        """Close the environment."""
        self._turns.made.close()
