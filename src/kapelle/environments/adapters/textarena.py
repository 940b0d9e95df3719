"""Adapter for TextArena games (arXiv:2504.11442), in which players take turns and write their moves as text."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from kapelle.environment import Outcome
from kapelle.environments.adapters.plain import make_own, need_package
from kapelle.environments.base import BaseState, GameSettings, need_movers
from kapelle.errors import ConfigError
from kapelle.runtime.foreign_code import reason
from kapelle.runtime.plugins import find_module, importable_here, split_target
from kapelle.types import Json, Split, Task


class TextArena(GameSettings):
    """A TextArena game. The agents of the team are its players, in order, and write moves in the format that the game describes.

    An observation repeats everything that the game has shown to the player, beginning with the rules, so the workflow `play` needs
    no memory. If the setting `rules` is a text of your own, the observation begins with this text.
    """

    name: Literal["textarena"] = "textarena"
    id: str = "TicTacToe-v0"
    """The name of the game in TextArena, or the user's own class, such as `mine:Game` or `./mine.py:Game`."""
    arguments: Mapping[str, Json] = Field(default={})
    """Keyword arguments for `textarena.make`."""
    max_moves: int = Field(default=200, ge=1)
    """The maximum number of moves per episode."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The range of the reward at the end of a game: -1 for a loss and 1 for a win."""
        return (-1.0, 1.0)

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the train and test games. The two splits use different seeds."""
        return {"train": f"games of {self.id}, by seed", "test": f"games of {self.id}, with different seeds"}

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if the package is missing, the game is unknown or the number of agents is wrong."""
        try:
            self._make(len(agents), 0)
        except ConfigError:
            raise
        except (AssertionError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{self.id} cannot be played by {len(agents)} agents ({', '.join(agents)}): {error} Check `environment.id`, "
                "`environment.arguments` and `team.agents`."
            ) from error

    def _make(self, players: int, seed: int) -> Any:
        textarena = need_package("textarena", "textarena", "textarena")
        before = random.getstate()
        try:
            module_name, name = split_target(self.id)
            what = f"environment.id: {self.id}"
            module = find_module(module_name, what, name) if name else None  # the module may register ids
            with importable_here():  # an entry point may be a string, `mine:Game`
                if module is not None and name in vars(module):
                    game = make_own(vars(module)[name], self.arguments, what)
                else:
                    game = textarena.make(name or self.id, **self.arguments)
            game.reset(num_players=players, seed=seed % 2**31)
        finally:
            random.setstate(before)  # games seed Python's shared generator
        return game

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ArenaState:
        """Create a game and return the state of the episode."""
        return ArenaState(self._make(len(agents), seed), task, agents, self, seed)


class ArenaState(BaseState):
    """The state of one game. Rewards are given at the end of the game.

    If the game raises an exception after a move, the game ends and the player of that move loses.
    """

    def __init__(self, game: Any, task: Task, agents: Sequence[str], settings: TextArena, seed: int) -> None:
        super().__init__(task, agents)
        self._game = game
        self._head = settings.head("", "")
        self._move_in = settings.move_in
        self._left = settings.max_moves
        self._outcome: Outcome | None = None
        # Games draw from Python's global random generator. This game stores its own generator state between moves.
        self._random = random.Random(seed).getstate()
        self._seen = dict.fromkeys(agents, "")
        self._read()

    def _read(self) -> None:
        player, seen = self._game.get_observation()
        self._mover = self.agents[int(player)]
        self._seen[self._mover] = seen if isinstance(seen, str) else "\n".join(str(part[1]) for part in seen)

    def observe(self, agent: str) -> str:
        """Return the text that the game showed to the player in the player's last turn."""
        return "\n".join(part for part in (self._head, self._seen[agent]) if part)

    def movers(self) -> tuple[str, ...]:
        """Return the player to move, or an empty tuple if the game has ended or has reached the maximum number of moves."""
        return () if self.over or not self._left else (self._mover,)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Make the player's move. Raises EpisodeError if any other agent acts."""
        need_movers(actions, self.movers())
        self._left -= 1
        shared = random.getstate()
        random.setstate(self._random)
        try:
            self.over, _ = self._game.step(action=self._move_in(actions[self._mover]) or "")
            if self.over:
                self._outcome = self._result()
            else:
                self._read()
        except Exception as error:  # noqa: BLE001 - games raise on unexpected texts
            # The reward is TextArena's for an invalid move. The game may be inconsistent now, so it ends.
            self.over, lost = True, {agent: -float(agent == self._mover) for agent in self.agents}
            why = f"Invalid move: the game raised {reason(error)}."
            self._outcome = Outcome(lost, None, {"reasons": {self._mover: why}})
        finally:
            self._random = random.getstate()
            random.setstate(shared)
        return {}

    def _result(self) -> Outcome:
        """Return the outcome of the finished game. Raises ValueError if a reward is not a number."""
        rewards, info = self._game.close()
        totals = {agent: float((rewards or {}).get(k, 0.0)) for k, agent in enumerate(self.agents)}
        reasons = {
            agent: str((info or {}).get(k, {}).get("reason", "")) for k, agent in enumerate(self.agents)
        }
        return Outcome(totals, None, {"reasons": {a: r for a, r in reasons.items() if r}})

    def outcome(self) -> Outcome:
        """Return the outcome of the game. If the game is unfinished, all rewards are 0."""
        return self._outcome or Outcome(dict.fromkeys(self.agents, 0.0), truncated=True)
