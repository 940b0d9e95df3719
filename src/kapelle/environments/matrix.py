"""Matrix games in which all agents move at once, for one round or several, with known optima."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, FiniteFloat, model_validator

from kapelle.environment import Outcome
from kapelle.environments import matrix_games
from kapelle.environments.game_settings import GameSettings
from kapelle.environments.matrix_games import Game
from kapelle.errors import ConfigError, EpisodeError
from kapelle.types import Message, Split, Task

GameName = Literal[
    "climbing", "penalty", "xor", "prisoners_dilemma", "stag_hunt", "matching_pennies", "custom"
]


MOST_LISTED = 64
"""Most joint moves whose payoffs the rules list."""


class Matrix(GameSettings):
    """A matrix game; every agent of the team is one player, in seat order, and writes one letter.

    An observation is the rules and `2/3 AB CAA`: second player of three, may say A or B, the last round went CAA
    (`-` stands for an invalid move). With `rules: none` nothing else is told; what a letter means an agent then learns,
    or reads in its prompt.
    """

    name: Literal["matrix"] = "matrix"
    game: GameName = "climbing"
    """One of the known games, or `custom` with `payoffs`."""
    payoffs: Mapping[str, FiniteFloat | tuple[FiniteFloat, ...]] = Field(default={})
    """For `game: custom`: every joint move, one letter per player, → one payoff for all or one each."""
    penalty: FiniteFloat = Field(default=-100.0, le=0.0)
    """The cost of mixing up the optima in `game: penalty`."""
    rounds: int = Field(default=1, ge=1)
    """Rounds of one episode."""
    memory: int | None = Field(default=1, ge=0)
    """Past rounds that an observation shows, null for all; an agent's conversation keeps earlier ones."""
    invalid: FiniteFloat | None = None
    """What an invalid move pays, at most the game's least payoff, which null takes."""

    @model_validator(mode="after")
    def _is_a_game(self) -> Matrix:
        if (self.game == "custom") != bool(self.payoffs):
            raise ValueError("`payoffs` and `game: custom` go together: set both or neither.")
        sizes = {
            (len(joint), len(paid) if isinstance(paid, tuple) else None)
            for joint, paid in self.payoffs.items()
        }
        if (
            any(joint == 0 or paid not in {None, joint} for joint, paid in sizes)
            or len({j for j, _ in sizes}) > 1
        ):
            raise ValueError(
                "Each key of `payoffs` names one letter per player and pays one number or one each."
            )
        if any(not letter.isalnum() for joint in self.payoffs for letter in joint):
            raise ValueError("The moves in `payoffs` are letters or digits.")
        game = self.table
        if gaps := game.gaps():
            raise ValueError(f"`payoffs` lacks the joint move '{gaps[0]}' ({len(gaps)} are missing).")
        if self.invalid is not None and self.invalid > game.least:
            raise ValueError(
                f"`invalid: {self.invalid}` would pay an invalid move more than the least payoff, {game.least}. "
                f"Set {game.least} or less."
            )
        return self

    @property
    def table(self) -> Game:
        """The game as a table."""
        known = {
            "climbing": matrix_games.CLIMBING,
            "penalty": matrix_games.penalty(self.penalty),
            "xor": matrix_games.XOR,
            "prisoners_dilemma": matrix_games.PRISONERS_DILEMMA,
            "stag_hunt": matrix_games.STAG_HUNT,
            "matching_pennies": matrix_games.MATCHING_PENNIES,
        }
        if self.game in known:
            return known[self.game]
        return Game(
            {
                joint: paid if isinstance(paid, tuple) else (paid,) * len(joint)
                for joint, paid in self.payoffs.items()
            }
        )

    @property
    def invalid_payoff(self) -> float:
        """What an invalid move pays."""
        return self.table.least if self.invalid is None else self.invalid

    @property
    def constant_sum(self) -> bool:
        """Whether the payoffs of every joint move add up to the same number."""
        return self.table.constant_sum

    @property
    def reward_range(self) -> tuple[float, float]:
        """The least and the greatest payoff in every round."""
        return (self.rounds * self.invalid_payoff, self.rounds * self.table.greatest)

    @property
    def sources(self) -> Mapping[Split, str]:
        """The game itself: it has no problems that could be held out."""
        return {
            "train": f"the game {self.game}",
            "test": f"the game {self.game}, the same: nothing to hold out",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError unless there is one agent for each player."""
        players = self.table.players
        if len(agents) != players:
            raise ConfigError(
                f"`game: {self.game}` has {players} players and the team has {len(agents)} agents "
                f"({', '.join(agents)}). Set `team.agents` to {players} agents, or another game."
            )

    def start(self, task: Task, agents: Sequence[str], seed: int) -> MatrixWorld:
        """Open one match."""
        self.check(agents)
        told = self.head(self._rules(), "All say one letter at once.")
        return MatrixWorld(self, agents, told)

    def _rules(self) -> str:
        """Return how the game is played, and what it pays unless the table is too long to be read."""
        game = self.table
        rounds = "one round" if self.rounds == 1 else f"{self.rounds} rounds"
        paid = {
            joint: f"{joint} {', '.join(f'{p:g}' for p in (pays[:1] if game.common else pays))}"
            for joint, pays in game.payoffs.items()
        }
        who = "all players" if game.common else "each player, in order"
        listed = (
            f" What a joint move (a letter of each player, in order) pays {who}: {'; '.join(paid.values())}."
        )
        return (
            f"A game of {game.players} players, played for {rounds}. In a round all say one letter at once, and are paid by "
            f"what all said. Anything but one of the letters shown is paid {self.invalid_payoff:g}."
            f"{listed if len(paid) <= MOST_LISTED else ''}"
        )

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return a legal move drawn evenly: it shows the form of a move and none of the skill."""
        seats = re.findall(r"\b([0-9]+)/[0-9]+ ", messages[-1].content if messages else "")
        moves = self.table.moves[int(seats[-1]) - 1 if seats else 0]
        return random.Random(f"{seed}/{agent}").choice(moves)


class MatrixWorld:
    """One match: every player moves at once in each round."""

    def __init__(self, settings: Matrix, agents: Sequence[str], told: str) -> None:
        self._game = settings.table
        self._agents = tuple(agents)
        self._moves = dict(zip(agents, self._game.moves, strict=True))
        self._rounds = settings.rounds
        self._memory = settings.memory
        self._invalid = settings.invalid_payoff
        self._move_in = settings.move_in
        self._told = told
        self._history: list[str] = []

    def observe(self, agent: str) -> str:
        """Return the rules, the seat, the legal letters and the last rounds' joint moves."""
        shown = self._history if self._memory is None else self._history[len(self._history) - self._memory :]
        seat = f"{self._agents.index(agent) + 1}/{len(self._agents)}"
        line = " ".join([seat, self._moves[agent], *shown])
        return f"{self._told}\n{line}" if self._told else line

    def movers(self) -> tuple[str, ...]:
        """Return all players until the last round is over."""
        return self._agents if len(self._history) < self._rounds else ()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Play one round and pay for it; EpisodeError unless exactly the players moved.

        A move is the letter alone, space around it aside. Who says anything else is paid `invalid`, and
        so is everybody in a game that pays all alike; in other games the rest are paid what they would
        earn on average over the moves that were not made, which the one who spoils a round cannot steer.
        """
        if set(actions) != set(self.movers()):
            raise EpisodeError(f"A round takes a move of each of {self.movers()}, not of {tuple(actions)}.")
        joint = [self._legal(agent, actions[agent]) for agent in self._agents]
        self._history.append("".join(move or "-" for move in joint))
        if self._game.common and None in joint:
            return dict.fromkeys(self._agents, self._invalid)
        paid = self._game.expected(joint)
        return {
            agent: self._invalid if move is None else float(reward)
            for agent, move, reward in zip(self._agents, joint, paid, strict=True)
        }

    def _legal(self, agent: str, text: str) -> str | None:
        move = (self._move_in(text) or "").strip()
        return move if len(move) == 1 and move in self._moves[agent] else None

    def outcome(self) -> Outcome:
        """Return the share of rounds that were played optimally for the team; None in a constant-sum game.

        Rounds that were not played count as failed.
        """
        optima = self._game.optima
        best = sum(joint in optima for joint in self._history) / self._rounds
        return Outcome(
            rewards=dict.fromkeys(self._agents, 0.0),
            success=None if self._game.constant_sum else best,
            info={
                "rounds": list(self._history),
                "optima": list(optima),
                "invalid": {
                    agent: sum(joint[k] == "-" for joint in self._history)
                    for k, agent in enumerate(self._agents)
                },
            },
            truncated=len(self._history) < self._rounds,
        )

    async def close(self) -> None:
        """Hold nothing."""
