"""Opponents that are no agents: random, scripted, tree search, and equilibria of small games.

An opponent plays a seat of its own by OpenSpiel's state, which holds more than a player may know: those that
search are refused where moves or cards are hidden.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kapelle.environments.openspiel.games import spiel, walk
from kapelle.environments.openspiel.text import match, plain_move
from kapelle.errors import ConfigError
from kapelle.settings.base import Settings

Choose = Callable[[Any, int], int]
"""State and seat → action, one of the legal ones."""


Chances = Mapping[str, Mapping[int, float]]
"""Information state → legal action → its probability."""


class RandomOpponent(Settings):
    """Draws evenly from the legal moves."""

    name: Literal["random"] = "random"

    def check(self, game: Any) -> None:
        """Can play every game."""

    def open(self, game: Any, seed: int) -> Choose:
        """Return the player of one episode."""
        draw = random.Random(seed)
        return lambda state, seat: int(draw.choice(state.legal_actions(seat)))


class ScriptedOpponent(Settings):
    """Makes the first of its moves that is legal, and the first legal move where none is."""

    name: Literal["scripted"] = "scripted"
    moves: tuple[str, ...] = ()
    """In order of preference, as OpenSpiel writes them (brackets and letter case aside)."""

    def check(self, game: Any) -> None:
        """Can play every game: a move that never becomes legal is never made."""

    def open(self, game: Any, seed: int) -> Choose:
        """Return the player of one episode."""
        return self._choose

    def _choose(self, state: Any, seat: int) -> int:
        legal = state.legal_actions(seat)
        names = [(plain_move(state.action_to_string(seat, action)),) for action in legal]
        places = [match(move, names) for move in self.moves]
        return int(legal[next((place for place in places if place is not None), 0)])


class TreeSearchOpponent(Settings):
    """Monte Carlo tree search with random rollouts (UCT); for games in which everything is seen."""

    name: Literal["mcts"] = "mcts"
    simulations: int = Field(default=100, ge=1)
    """Games that it plays out in its head for one move."""

    def check(self, game: Any) -> None:
        """Raise ConfigError for hidden information and simultaneous moves: the search would look at them."""
        kind, types = game.get_type(), spiel().GameType
        if (
            kind.information != types.Information.PERFECT_INFORMATION
            or kind.dynamics != types.Dynamics.SEQUENTIAL
        ):
            raise ConfigError(
                f"The opponent `mcts` sees the whole state, and {game} hides some of it from players. "
                "Take `random`, `cfr` or `nash`."
            )

    def open(self, game: Any, seed: int) -> Choose:
        """Return the player of one episode."""
        evaluator = spiel().RandomRolloutEvaluator(n_rollouts=1, seed=seed % 2**31)
        exploration, megabytes = 2.0, 64
        bot = spiel().MCTSBot(
            game, evaluator, exploration, self.simulations, megabytes, True, seed % 2**31, False
        )
        return lambda state, _seat: int(bot.step(state))


class RegretOpponent(Settings):
    """Plays the average policy of counterfactual regret minimisation, CFR+ (1407.5042), in a small game."""

    name: Literal["cfr"] = "cfr"
    iterations: int = Field(default=200, ge=1)
    """Iterations of the solver, once in a process."""

    def check(self, game: Any) -> None:
        """Raise ConfigError for a game that cannot be walked as a whole."""
        check_solvable(game, self.name)

    def open(self, game: Any, seed: int) -> Choose:
        """Return the player of one episode; the first one in a process solves the game."""
        return play_table(regret_policy(str(game), self.iterations), seed)


class EquilibriumOpponent(Settings):
    """Plays a Nash equilibrium of a small zero-sum game of two, up to a stated NashConv."""

    name: Literal["nash"] = "nash"
    tolerance: float = Field(default=0.01, gt=0)
    """Greatest NashConv: what both players together could still gain by deviating, in units of utility."""

    def check(self, game: Any) -> None:
        """Raise ConfigError unless the game is zero-sum, for two, and can be walked as a whole."""
        check_solvable(game, self.name)
        if game.num_players() != 2 or game.get_type().utility != spiel().GameType.Utility.ZERO_SUM:
            raise ConfigError(
                f"The opponent `nash` is for zero-sum games of two players, and {game} is none. Take `cfr`."
            )

    def open(self, game: Any, seed: int) -> Choose:
        """Return the player of one episode; the first one in a process solves the game."""
        return play_table(equilibrium(str(game), self.tolerance), seed)


_Kind = RandomOpponent | ScriptedOpponent | TreeSearchOpponent | RegretOpponent | EquilibriumOpponent


def _by_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


Opponent = Annotated[_Kind, Field(discriminator="name"), BeforeValidator(_by_name)]
"""Settings of an opponent: its name alone, or `{name: mcts, simulations: 200}`."""


def check_solvable(game: Any, opponent: str) -> None:
    """Raise ConfigError unless every decision of the game can be tabulated."""
    if not game.get_type().provides_information_state_string:
        raise ConfigError(
            f"The opponent `{opponent}` needs information states, and OpenSpiel has none for {game}. Take `random`."
        )
    count_decisions(str(game))


@cache
def count_decisions(written: str) -> int:
    """Return the number of histories of a game in which somebody moves; ConfigError where there are too many.

    A game is given as OpenSpiel writes it, parameters included: its objects cannot be told apart otherwise.
    """
    return sum(1 for _ in walk(spiel().load_game(written)))


@cache
def regret_policy(written: str, iterations: int) -> Chances:
    """Return the average policy after so many iterations of CFR+; kept for the process."""
    solver = spiel().CFRPlusSolver(spiel().load_game(written))
    for _ in range(iterations):
        solver.evaluate_and_update_policy()
    return _table(written, solver)


@cache
def equilibrium(written: str, tolerance: float) -> Chances:
    """Return a policy whose NashConv is at most `tolerance`; kept for the process.

    Raises ConfigError when 20,000 iterations of CFR+ do not reach it.
    """
    game = spiel().load_game(written)
    solver, done, burst = spiel().CFRPlusSolver(game), 0, 50
    while done < 20_000:
        for _ in range(burst):
            solver.evaluate_and_update_policy()
        done += burst
        if spiel().nash_conv(game, solver.average_policy()) <= tolerance:
            return _table(written, solver)
        burst = min(done, 2000)
    raise ConfigError(
        f"No policy of {written} with a NashConv of {tolerance} was found. Set a greater `tolerance`."
    )


def _table(written: str, solver: Any) -> Chances:
    """Return a solver's average policy as plain numbers: OpenSpiel's object dies with its solver."""
    policy = solver.average_policy()
    keys = {state.information_state_string() for state in walk(spiel().load_game(written))}
    return {key: dict(policy.action_probabilities(key)) for key in sorted(keys)}


def play_table(chances: Chances, seed: int) -> Choose:
    """Return a player that draws its moves from a table's probabilities."""
    draw = random.Random(seed)

    def choose(state: Any, seat: int) -> int:
        own = chances[state.information_state_string(seat)]
        return int(draw.choices(list(own), list(own.values()))[0])

    return choose
