"""Matrix games with simultaneous moves and known optima, played for one or more rounds."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, FiniteFloat, model_validator

from kapelle.environment import Decision, Enumerable, KnowsMoves, ListsMoves, Outcome, Reporting, Scripted
from kapelle.environments.base import BaseState, GameSettings, need_movers
from kapelle.errors import ConfigError
from kapelle.runtime.randomness import derive_seed
from kapelle.types import Message, Split, Task

# -------- Games as tables, whose optima are found by enumeration

Joint = str
"""A joint move as a string with one letter per player, in the order of the players."""


@dataclass(frozen=True, slots=True)
class Game:
    """A finite game in normal form."""

    payoffs: Mapping[Joint, tuple[float, ...]]
    """The payoff matrix: a mapping from every joint move to the payoff of each player."""

    @property
    def players(self) -> int:
        """The number of players."""
        return len(next(iter(self.payoffs)))

    @property
    def moves(self) -> tuple[str, ...]:
        """The legal letters of each player, in the order of the payoff matrix."""
        return tuple("".join(dict.fromkeys(joint[k] for joint in self.payoffs)) for k in range(self.players))

    @property
    def least(self) -> float:
        """The smallest payoff in the matrix."""
        return min(min(payoffs) for payoffs in self.payoffs.values())

    @property
    def greatest(self) -> float:
        """The largest payoff in the matrix."""
        return max(max(payoffs) for payoffs in self.payoffs.values())

    @property
    def common(self) -> bool:
        """Whether every joint move gives all players the same payoff (pure coordination)."""
        return all(len(set(payoffs)) == 1 for payoffs in self.payoffs.values())

    @property
    def constant_sum(self) -> bool:
        """Whether the gains of each player equal the losses of the other players."""
        return len({sum(payoffs) for payoffs in self.payoffs.values()}) == 1

    @property
    def optima(self) -> tuple[Joint, ...]:
        """The joint moves with the largest sum of payoffs over all players."""
        best = max(sum(payoffs) for payoffs in self.payoffs.values())
        return tuple(joint for joint, payoffs in self.payoffs.items() if sum(payoffs) == best)

    def alike(self) -> list[str]:
        """Return sets of interchangeable letters.

        If two letters of a set are exchanged for all players, every payoff stays the same.
        """
        sets: list[str] = []
        for letter in dict.fromkeys("".join(self.moves)):
            place = next((k for k, own in enumerate(sets) if self._exchangeable(own[0], letter)), None)
            if place is None:
                sets.append(letter)
            else:
                sets[place] += letter
        return sets

    def _exchangeable(self, one: str, other: str) -> bool:
        swapped = str.maketrans(one + other, other + one)
        return all(
            self.payoffs.get(joint.translate(swapped)) == payoffs for joint, payoffs in self.payoffs.items()
        )

    def gaps(self) -> list[Joint]:
        """Return the joint moves that are missing from the payoff matrix."""
        return [joint for joint in map("".join, itertools.product(*self.moves)) if joint not in self.payoffs]

    def expected(self, joint: Sequence[str | None]) -> tuple[float, ...]:
        """Return the payoff of each player for a joint move.

        For a player whose move is missing (None), average over all moves of the player.
        """
        choices = [moves if move is None else move for move, moves in zip(joint, self.moves, strict=True)]
        rows = [self.payoffs["".join(letters)] for letters in itertools.product(*choices)]
        return tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))


def _shared(moves: str, rows: Sequence[Sequence[float]]) -> Game:
    """Return a two-player game in which both players receive the same payoff."""
    return Game({a + b: (rows[i][j],) * 2 for i, a in enumerate(moves) for j, b in enumerate(moves)})


def penalty(k: float) -> Game:
    """Return the penalty game (Claus and Boutilier 1998), which has two optima and gives the payoff `k` if the players mix the optima."""
    return _shared("ABC", [[10, 0, k], [0, 2, 0], [k, 0, 10]])


CLIMBING = _shared("ABC", [[11, -30, 0], [-30, 7, 6], [0, 0, 5]])
"""The climbing game (Claus and Boutilier 1998). The optimum AA is the riskiest joint move, so independent learners converge to lower
payoffs."""

XOR = _shared("AB", [[0, 1], [1, 0]])
"""The XOR game (arXiv:2206.07505). Two players must choose different moves, which is impossible for a deterministic policy that both
share."""

PRISONERS_DILEMMA = Game({"CC": (3, 3), "CD": (0, 5), "DC": (5, 0), "DD": (1, 1)})
"""The prisoner's dilemma (Axelrod 1984). Each player gains by defecting, but mutual cooperation is better for both players than mutual
defection."""

STAG_HUNT = Game({"SS": (4, 4), "SH": (1, 3), "HS": (3, 1), "HH": (2, 2)})
"""The stag hunt (Skyrms 2004). The equilibrium SS is payoff-dominant, and the equilibrium HH is risk-dominant."""

MATCHING_PENNIES = Game({"HH": (1, -1), "HT": (-1, 1), "TH": (-1, 1), "TT": (1, -1)})
"""Matching pennies, a zero-sum game. In the only equilibrium, both players choose each move with probability 1/2, and the value of the
game is 0."""


GameName = Literal[
    "climbing", "penalty", "xor", "prisoners_dilemma", "stag_hunt", "matching_pennies", "custom"
]


MOST_LISTED = 64
"""The maximum number of joint moves whose payoffs are listed in the rules."""


class Matrix(GameSettings, Enumerable, ListsMoves, Reporting, Scripted):
    """A matrix game. The agents of the team are the players, in order, and each agent writes one letter per round.

    An observation consists of the rules and a line such as `2/3 AB CAA`. The line `2/3 AB CAA` means that the agent is the second
    of three players, its legal moves are A and B, and the joint move in the last round was CAA. The character `-` stands for an
    invalid move. If `rules` is `none`, the observation is only this line; the agent must then learn the meaning of the letters, or
    its prompt must explain them.
    """

    name: Literal["matrix"] = "matrix"
    game: GameName = "climbing"
    """The name of a built-in game, or `custom` for a game defined by `payoffs`."""
    payoffs: Mapping[str, FiniteFloat | tuple[FiniteFloat, ...]] = Field(default={})
    """The payoff matrix of a custom game: a mapping from every joint move (one letter per player) to one payoff for all players or to
    one payoff for each player."""
    penalty: FiniteFloat = Field(default=-100.0, le=0.0)
    """The payoff for mixing the two optima in the game `penalty`."""
    rounds: int = Field(default=1, ge=1)
    """The number of rounds per episode."""
    memory: int | None = Field(default=1, ge=0)
    """The number of past rounds that an observation shows. If null, an observation shows all past rounds. Earlier rounds are also part
    of an agent's conversation."""
    other_play: bool = False
    """Whether interchangeable letters are renamed at random in each episode for every player except the first. If letters are renamed,
    players cannot rely on a convention to coordinate (other-play, arXiv:2003.02979)."""
    invalid: FiniteFloat | None = None
    """The payoff of an invalid move, which must not exceed the smallest payoff of the game. If null, the smallest payoff is used."""

    @model_validator(mode="after")
    def _is_a_game(self) -> Matrix:
        if (self.game == "custom") != bool(self.payoffs):
            raise ValueError("`payoffs` and `game: custom` must be set together. Set both or neither.")
        sizes = {
            (len(joint), len(payoffs) if isinstance(payoffs, tuple) else None)
            for joint, payoffs in self.payoffs.items()
        }
        if (
            any(joint == 0 or payoffs not in {None, joint} for joint, payoffs in sizes)
            or len({j for j, _ in sizes}) > 1
        ):
            raise ValueError(
                "Each key of `payoffs` needs one letter per player, and each value one number, or one number per player."
            )
        if any(not letter.isalnum() for joint in self.payoffs for letter in joint):
            raise ValueError("Moves in `payoffs` must be letters or digits.")
        game = self.table
        if gaps := game.gaps():
            raise ValueError(f"`payoffs` lacks the joint move '{gaps[0]}' ({len(gaps)} missing in total).")
        if self.invalid is not None and self.invalid > game.least:
            raise ValueError(
                f"`invalid: {self.invalid}` exceeds the least payoff of the game. Set `invalid` to {game.least} or less."
            )
        return self

    @property
    def table(self) -> Game:
        """The game with its payoff matrix."""
        known = {
            "climbing": CLIMBING,
            "penalty": penalty(self.penalty),
            "xor": XOR,
            "prisoners_dilemma": PRISONERS_DILEMMA,
            "stag_hunt": STAG_HUNT,
            "matching_pennies": MATCHING_PENNIES,
        }
        if self.game in known:
            return known[self.game]
        return Game(
            {
                joint: payoffs if isinstance(payoffs, tuple) else (payoffs,) * len(joint)
                for joint, payoffs in self.payoffs.items()
            }
        )

    @property
    def invalid_payoff(self) -> float:
        """The payoff of an invalid move."""
        return self.table.least if self.invalid is None else self.invalid

    @property
    def constant_sum(self) -> bool:
        """Whether the payoffs of all players have the same sum for every joint move."""
        return self.table.constant_sum

    @property
    def players(self) -> int:
        """The number of players."""
        return self.table.players

    def decisions(self) -> Iterator[Decision]:
        """Yield the observation of each player in a game with one round. Raises ConfigError if the game has several rounds."""
        if self.rounds > 1:
            raise ConfigError(
                f"`matrix` has exact values for one round only, but `rounds` is {self.rounds}. Set `environment.rounds: 1`."
            )
        names = tuple(f"agent_{player}" for player in range(self.players))
        state = self.start(self.task("train", 0), names, 0)
        for player, (name, moves) in enumerate(zip(names, self.table.moves, strict=True)):
            yield Decision(
                str(player), player, state.observe(name), tuple(range(len(moves))), tuple(moves), ()
            )

    def exact_values(self, policy: Mapping[str, Mapping[int, float]]) -> tuple[tuple[float, ...], float]:
        """Return the expected payoff of each player and NashConv, computed by enumerating the payoff matrix."""
        values = [self._values(policy, player) for player in range(self.players)]
        expected = [
            sum(policy[str(player)].get(move, 0.0) * value for move, value in enumerate(values[player]))
            for player in range(self.players)
        ]
        gain = sum(max(each) - own for each, own in zip(values, expected, strict=True))
        return tuple(expected), max(0.0, gain)

    def best_response(
        self, policy: Mapping[str, Mapping[int, float]], player: int
    ) -> tuple[float, Mapping[str, int]]:
        """Return the payoff of a player's best letter against the policies of the other players, and the index of this letter."""
        values = self._values(policy, player)
        return max(values), {str(player): values.index(max(values))}

    def visits(self, policy: Mapping[str, Mapping[int, float]]) -> Mapping[str, float]:
        """Return 1 for every player, because each player moves once per game."""
        return {str(player): 1.0 for player in range(self.players)}

    def _values(self, policy: Mapping[str, Mapping[int, float]], player: int) -> list[float]:
        """Return the expected payoff of each letter of a player against the policies of the other players."""
        game = self.table
        values = dict.fromkeys(game.moves[player], 0.0)
        for joint, payoffs in game.payoffs.items():
            chance = math.prod(
                policy[str(other)].get(game.moves[other].index(letter), 0.0)
                for other, letter in enumerate(joint)
                if other != player
            )
            values[joint[player]] += chance * payoffs[player]
        return list(values.values())

    @property
    def reward_range(self) -> tuple[float, float]:
        """The minimum and maximum return: the smallest or the largest payoff in every round."""
        return (self.rounds * self.invalid_payoff, self.rounds * self.table.greatest)

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the game, which is the same in both splits."""
        return {
            "train": f"the game {self.game}",
            "test": f"the same game {self.game} (a game has no held-out tasks)",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if the number of agents differs from the number of players."""
        players = self.table.players
        if len(agents) != players:
            raise ConfigError(
                f"`game: {self.game}` has {players} players, but the team has {len(agents)} agents "
                f"({', '.join(agents)}). Define {players} agents in `team.agents`, or choose another game."
            )

    def start(self, task: Task, agents: Sequence[str], seed: int) -> MatrixState:
        """Start an episode of the game and return its state."""
        self.check(agents)
        rules = self.head(self._rules(), "All say one letter at once.")
        return MatrixState(self, task, agents, rules, seed)

    def renamed(self, seat: int, seed: int) -> Mapping[str, str]:
        """Return a mapping from each letter that a player writes to the letter that it stands for in the game in this episode."""
        found: dict[str, str] = {}
        draw = random.Random(derive_seed("other-play", seat, seed))
        for own in self.table.alike():
            letters = list(own)
            if self.other_play and seat > 0:
                draw.shuffle(letters)
            found |= zip(own, letters, strict=True)
        return found

    def _rules(self) -> str:
        """Return the rules of the game. The rules list the payoffs if there are at most `MOST_LISTED` joint moves."""
        game = self.table
        rounds = "one round" if self.rounds == 1 else f"{self.rounds} rounds"
        listed = {
            joint: f"{joint} {', '.join(f'{p:g}' for p in (payoffs[:1] if game.common else payoffs))}"
            for joint, payoffs in game.payoffs.items()
        }
        who = "all players" if game.common else "each player, in order"
        sentence = f" What a joint move (a letter of each player, in order) pays {who}: {'; '.join(listed.values())}."
        return (
            f"A game of {game.players} players, played for {rounds}. In a round all say one letter at once, and are paid by "
            f"what all said. Anything but one of the letters shown is paid {self.invalid_payoff:g}."
            f"{sentence if len(listed) <= MOST_LISTED else ''}"
        )

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return a random legal move, which demonstrates only the format of a move."""
        places = re.findall(r"\b([0-9]+)/[0-9]+ ", messages[-1].content if messages else "")
        moves = self.table.moves[int(places[-1]) - 1 if places else 0]
        return random.Random(f"{seed}/{agent}").choice(moves)


class MatrixState(BaseState, KnowsMoves):
    """The state of an episode of a matrix game. In each round, all players move simultaneously."""

    def __init__(self, settings: Matrix, task: Task, agents: Sequence[str], rules: str, seed: int) -> None:
        super().__init__(task, agents)
        self._game = settings.table
        self._moves = dict(zip(agents, self._game.moves, strict=True))
        self._rounds = settings.rounds
        self._memory = settings.memory
        self._invalid = settings.invalid_payoff
        self._move_in = settings.move_in
        self._rules = rules
        self._meant = {agent: settings.renamed(player, seed) for player, agent in enumerate(agents)}
        """Mapping from an agent to a mapping from each letter that the agent writes to the letter that it stands for in the game."""
        self._history: list[str] = []

    def observe(self, agent: str) -> str:
        """Return the rules, the position of the player, its legal letters and the joint moves of the last rounds."""
        shown = self._history if self._memory is None else self._history[len(self._history) - self._memory :]
        place = f"{self.agents.index(agent) + 1}/{len(self.agents)}"
        written = {meant: letter for letter, meant in self._meant[agent].items()}
        past = ["".join(written.get(letter, letter) for letter in joint) for joint in shown]
        line = " ".join([place, self._moves[agent], *past])
        return f"{self._rules}\n{line}" if self._rules else line

    def legal(self, agent: str) -> Sequence[str]:
        """Return the legal letters of the player, or an empty tuple after the last round."""
        return tuple(self._moves[agent]) if self.movers() else ()

    def movers(self) -> tuple[str, ...]:
        """Return all players, or an empty tuple after the last round."""
        return self.agents if len(self._history) < self._rounds else ()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Apply the moves of one round and return the payoffs. Raises EpisodeError if the agents that act are not exactly the movers.

        A move is a single letter; surrounding whitespace is ignored. An agent that writes anything else receives the payoff
        `invalid`. In a game of pure coordination, an invalid move gives all agents this payoff. In any other game, the payoffs of
        the other agents are averaged over all possible moves of the agent with the invalid move, so that this agent cannot
        influence them.
        """
        need_movers(actions, self.movers())
        joint: list[str | None] = []
        for agent in self.agents:
            move = (self._move_in(actions[agent]) or "").strip()
            joint.append(self._meant[agent][move] if len(move) == 1 and move in self._moves[agent] else None)
        self._history.append("".join(move or "-" for move in joint))
        if self._game.common and None in joint:
            return dict.fromkeys(self.agents, self._invalid)
        payoffs = self._game.expected(joint)
        return {
            agent: self._invalid if move is None else float(reward)
            for agent, move, reward in zip(self.agents, joint, payoffs, strict=True)
        }

    def outcome(self) -> Outcome:
        """Return the outcome. The success is the fraction of rounds with an optimal joint move, or None in a constant-sum game.

        Rounds that were not played do not count as optimal.
        """
        optima = self._game.optima
        best = sum(joint in optima for joint in self._history) / self._rounds
        return Outcome(
            rewards=dict.fromkeys(self.agents, 0.0),
            success=None if self._game.constant_sum else best,
            info={
                "rounds": list(self._history),
                "optima": list(optima),
                "invalid": {
                    agent: sum(joint[k] == "-" for joint in self._history)
                    for k, agent in enumerate(self.agents)
                },
            },
            truncated=len(self._history) < self._rounds,
        )
