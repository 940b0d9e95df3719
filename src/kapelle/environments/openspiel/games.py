"""Games of OpenSpiel by name, with presets from the literature, their rules, and opponents that are not agents.

OpenSpiel (arXiv:1908.09453) is an optional package, which is imported when the first game is loaded.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from kapelle.environments.openspiel.hanabi import choose, sizes_of
from kapelle.environments.openspiel.text import match, plain_move
from kapelle.errors import AbsentPackage, ConfigError, did_you_mean
from kapelle.settings.base import Settings

Value = bool | int | float | str
"""The type of a game parameter."""

PRESETS: Mapping[str, tuple[str, Mapping[str, Value]]] = {
    "hanabi_very_small": (
        "hanabi",
        {"colors": 1, "ranks": 5, "hand_size": 2, "max_information_tokens": 3, "max_life_tokens": 1},
    ),
    "hanabi_small": (
        "hanabi",
        {"colors": 2, "ranks": 5, "hand_size": 2, "max_information_tokens": 3, "max_life_tokens": 1},
    ),
    "hanabi_full": ("hanabi", {}),
}
"""Presets for the sizes of Hanabi in arXiv:1902.00506. The parameter `players` (2 to 5) and all other parameters can still be set."""

MOST_NODES = 500_000
"""The maximum number of nodes of a game that is passed to OpenSpiel's solvers."""


def spiel() -> Any:
    """Import and return the module of OpenSpiel. Raises ConfigError if OpenSpiel is not installed."""
    try:
        import pyspiel
    except ImportError as error:
        raise AbsentPackage(
            "The environment `openspiel` needs the package open_spiel, which is not installed. "
            "Install it with `pip install 'kapelle[games]'`."
        ) from error
    return pyspiel


def load_game(name: str, parameters: Mapping[str, Value], seed: int = 0) -> Any:
    """Return the game with the given name in OpenSpiel or the given preset name.

    The name may contain parameters in OpenSpiel's notation, such as `kuhn_poker(players=3)`. The argument `parameters` overrides
    them. `seed` affects only games in which OpenSpiel itself samples chance events. Raises ConfigError for invalid combinations of
    parameters, and for an unknown game or parameter; the message then suggests the closest known name.
    """
    try:
        written = spiel().game_parameters_from_string(name)
    except spiel().SpielError as error:
        raise ConfigError(f"environment.game '{name}' cannot be read: {error}") from error
    named = written.pop("name")
    short, preset = PRESETS.get(named, (named, {}))
    given = {**preset, **written, **parameters}
    kind = _kinds().get(short)
    if kind is None:
        known = [*_kinds(), *PRESETS]
        raise ConfigError(f"environment.game: unknown game '{short}'.{did_you_mean(short, known)}")
    for key in given:
        if key not in kind.parameter_specification:
            close = did_you_mean(key, kind.parameter_specification)
            raise ConfigError(f"The game '{short}' has no parameter '{key}' (environment.parameters).{close}")
    if kind.chance_mode == spiel().GameType.ChanceMode.SAMPLED_STOCHASTIC:
        given["rng_seed"] = (int(given.get("rng_seed", 0)) + seed) % 2**31
    try:
        game = spiel().load_game(short, given)
    except spiel().SpielError as error:
        raise ConfigError(
            f"OpenSpiel cannot load '{short}' with environment.parameters {given}: {error}."
        ) from error
    kind = game.get_type()
    if kind.dynamics == spiel().GameType.Dynamics.MEAN_FIELD:
        raise ConfigError(f"'{short}' is a mean-field game, which is not supported. Choose another game.")
    if not (kind.provides_information_state_string or kind.provides_observation_string):
        raise ConfigError(f"OpenSpiel has no text observations for '{short}'. Choose another game.")
    return game


@cache
def _kinds() -> Mapping[str, Any]:
    return {kind.short_name: kind for kind in spiel().registered_games()}


def walk(game: Any, most: int = MOST_NODES) -> Iterator[Any]:
    """Yield every state in which a player moves, once for each history. Simultaneous moves are converted to turns (`in_turns`).

    Raises ConfigError if OpenSpiel samples the chance events of the game or the game has more than `most` nodes.
    """
    check_walkable(game)
    game = in_turns(game)
    check_size(game, most)
    waiting, seen = [game.new_initial_state()], 0
    while waiting:
        state = waiting.pop()
        seen += 1
        if seen > most:
            raise too_large(game, most)
        if state.is_terminal():
            continue
        if not state.is_chance_node():
            yield state
        waiting.extend(state.child(action) for action in reversed(state.legal_actions()))


def check_walkable(game: Any) -> None:
    """Raise ConfigError if OpenSpiel samples the chance events of the game."""
    if game.get_type().chance_mode == spiel().GameType.ChanceMode.SAMPLED_STOCHASTIC:
        raise ConfigError(
            f"OpenSpiel samples the chance events of {game}, so it cannot be solved exactly. Use kuhn_poker, leduc_poker, tiny_hanabi or "
            "liars_dice."
        )


PROBES, ABOVE, FACTOR = 16, 4, 1000
"""Constants of `check_size`: the number of random games, the number of them that must exceed the bound before a game is rejected, and
the factor by which they must exceed it."""


def check_size(game: Any, most: int) -> None:
    """Raise ConfigError if the tree of a game almost certainly has more than `most` nodes. The tree is not enumerated.

    A random game with b₁, b₂, … legal moves gives the unbiased estimate 1 + b₁ + b₁b₂ + … of the number of nodes (Knuth 1975,
    "Estimating the efficiency of backtrack programs"). By Markov's inequality, such an estimate exceeds c times the true number
    with probability below 1/c. A game that fits is therefore rejected with probability below C(16, 4) / 1000⁴ = 2e-9. A game that
    is too large may pass the check.
    """
    draw, above = random.Random(0), 0
    for _ in range(PROBES):
        state, nodes, level = game.new_initial_state(), 1, 1
        while nodes <= FACTOR * most and not state.is_terminal():
            moves = state.legal_actions()
            level *= len(moves)
            nodes += level
            state.apply_action(draw.choice(moves))
        above += nodes > FACTOR * most
    if above >= ABOVE:
        raise too_large(game, most)


def in_turns(game: Any) -> Any:
    """Convert a game with simultaneous moves to a game in which these moves are made one after another.

    Other games are returned unchanged.

    Each move stays hidden until all simultaneous moves are made. All players therefore have the same information as in the original
    game, and values and equilibria are the same.
    """
    simultaneous = game.get_type().dynamics == spiel().GameType.Dynamics.SIMULTANEOUS
    return spiel().convert_to_turn_based(game) if simultaneous else game


def as_played(game: Any, state: Any) -> Any:
    """Return the state of the original game that corresponds to a state of `in_turns(game)`.

    The returned state is the state before all simultaneous moves.
    """
    simultaneous = game.get_type().dynamics == spiel().GameType.Dynamics.SIMULTANEOUS
    return state.simultaneous_game_state() if simultaneous else state


def too_large(game: Any, most: int) -> ConfigError:
    """Return the error for a game whose tree has more than `most` nodes."""
    return ConfigError(
        f"The game {game} has more than {most} nodes, which is too many to solve exactly. Choose a smaller game, "
        "or the opponents `random` or `mcts`."
    )


# -------- The rules of OpenSpiel's games in a few sentences, which precede the observations


@cache
def _rules() -> Mapping[str, Mapping[str, str]]:
    """Return a mapping from the name of a game to its rules in the lengths `full` and `short`."""
    return tomllib.loads((files(__package__) / "rules.toml").read_text("utf-8"))


def rules_of(game: Any) -> tuple[str, str]:
    """Return the full rules of a game and its rules in one short sentence. If no rules are stored, both are a general description."""
    name, players, has = game.get_type().short_name, game.num_players(), dict(game.get_parameters())
    if "MatrixGame" in type(game).__name__:
        name = "matrix game"
    if name not in _rules():
        return unknown_rules(game), unknown_rules(game)
    has["players"] = players
    match name:
        case "kuhn_poker":
            has["cards"] = players + 1
        case "leduc_poker":
            ranks = players + 1
            has["deck"] = (
                f"two cards each of the ranks 0 to {ranks - 1}"
                if has["suit_isomorphism"]
                else f"{2 * ranks} cards numbered from 0, of which 0 and 1, 2 and 3 and so on have the same rank"
            )
        case "hanabi":
            has = {**has, **asdict(sizes_of([game]))}
            has["s"] = "s" * (has["colors"] != 1)
        case "tiny_hanabi":
            cards, moves = int(has["num_chance"]), int(has["num_actions"])
            has["table"] = ""
            if players == 2:
                payoffs = str(has["payoff"]).split(";")
                rows = [" ".join(payoffs[k : k + moves]) for k in range(0, len(payoffs), moves)]
                deals = [
                    f"cards {one} and {other} pay {' / '.join(rows[(one * cards + other) * moves :][:moves])}"
                    for one in range(cards)
                    for other in range(cards)
                ]
                has["table"] = f" Rows are the first player's move, columns the second's: {'; '.join(deals)}."
        case "goofspiel":
            has["order"] = "a random" if has["points_order"] == "random" else has["points_order"]
            has["hidden"] = " Bids stay hidden; only who won is told." if has["imp_info"] else ""
            has["ends"] = {
                "win_loss": "Most points win.",
                "point_difference": "The result is one's points less the mean of all.",
                "total_points": "The result is one's points.",
            }[has["returns_type"]]
        case "liars_dice":
            has["die"] = "die" if has["numdice"] == 1 else "dice"
            has["raised"] = (
                "more dice, or as many of a higher face"
                if has["bidding_rule"] == "reset-face"
                else "a higher face, or more dice of the same face"
            )
        case "nim":
            has["last"] = "loses" if has["is_misere"] else "wins"
            has["piles"] = ", ".join(str(has["pile_sizes"]).split(";"))
        case "negotiation":
            has["talk"] = (
                f" With each proposal a player says {has['utterance_dim']} symbols, which have no meaning but what players give "
                "them."
                if has["enable_utterances"]
                else ""
            )
        case "matrix game":
            has["title"] = game.get_type().long_name
            has["pays"] = "; ".join(
                f"{game.row_action_name(r)} and {game.col_action_name(c)}: {game.row_utility(r, c):g}, "
                f"{game.col_utility(r, c):g}"
                for r in range(game.num_rows())
                for c in range(game.num_cols())
            )
    rules = _rules()[name]
    return rules["full"].format(**has), rules["short"].format(**has)


def unknown_rules(game: Any) -> str:
    """Return a general description of a game: its name, the number of players, and how the results of the players are related."""
    kind = game.get_type()
    shared = {
        "ZERO_SUM": "What one player wins the others lose.",
        "CONSTANT_SUM": "What one player wins the others lose.",
        "IDENTICAL": "All players play together and get the same result.",
    }.get(kind.utility.name, "Each player has a result of its own.")
    return (
        f"{kind.long_name} is a game for {game.num_players()} player{'s' * (game.num_players() != 1)}. {shared} "
        f"Results go from {game.min_utility():g} to {game.max_utility():g}."
    )


# -------- Opponents that are not agents: random, scripted, tree search, and equilibria of small games
#
# An opponent reads OpenSpiel's state, which contains hidden information. In games with hidden moves or cards, opponents that
# search therefore raise an error.

Choose = Callable[[Any, int], int]
"""A policy as a function that takes (state, player) and returns a legal action."""
Chances = Mapping[str, Mapping[int, float]]
"""A tabular policy: a mapping from an information state to the probability of each legal action."""


class RandomOpponent(Settings):
    """An opponent that samples uniformly from the legal moves."""

    name: Literal["random"] = "random"

    def check(self, game: Any) -> None:
        """Accept any game."""

    def open(self, game: Any, seed: int) -> Choose:
        """Return the policy for one episode."""
        draw = random.Random(seed)
        return lambda state, player: int(draw.choice(state.legal_actions(player)))


class ScriptedOpponent(Settings):
    """An opponent that makes the first legal move in a list.

    If no listed move is legal, the opponent makes the first legal move of the game.
    """

    name: Literal["scripted"] = "scripted"
    moves: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda value: value.split("|") if isinstance(value, str) else value),
    ] = ()
    """The moves in order of preference, in OpenSpiel's notation (brackets and letter case are ignored), or a single string in which
    the moves are separated by `|`. Illegal moves are skipped."""

    def check(self, game: Any) -> None:
        """Accept any game."""

    def open(self, game: Any, seed: int) -> Choose:
        """Return the policy for one episode."""
        return self._choose

    def _choose(self, state: Any, player: int) -> int:
        legal = state.legal_actions(player)
        names = [(plain_move(state.action_to_string(player, action)),) for action in legal]
        places = [match(move, names) for move in self.moves]
        return int(legal[next((place for place in places if place is not None), 0)])


class _OnlyHanabi(Settings):
    """Base class of scripted Hanabi players."""

    name: Literal["hanabi"] = "hanabi"

    def check(self, game: Any) -> None:
        """Raise ConfigError if the game is not Hanabi."""
        if game.get_type().short_name != "hanabi":
            raise ConfigError(
                f"The player `hanabi` supports only Hanabi, but the game is {game}. Choose another opponent, or remove `demonstrator`."
            )


class Demonstrator(_OnlyHanabi):
    """A demonstrator for a warm-up in Hanabi, which makes the moves of the careful scripted player, mixed with random moves."""

    slips: float = Field(default=0.5, ge=0.0, le=1.0)
    """The fraction of moves that are sampled uniformly from the legal moves."""


class HanabiOpponent(_OnlyHanabi):
    """An opponent that plays Hanabi by simple rules from its own observation (`environments.openspiel.hanabi.choose`)."""

    bold: bool = False
    """Whether the opponent also plays a hinted card that may fit, as long as a mistake does not end the game."""

    def open(self, game: Any, seed: int) -> Choose:
        """Return the policy for one episode."""
        draw = random.Random(seed)
        return lambda state, player: choose(state, player, draw, bold=self.bold)


class TreeSearchOpponent(Settings):
    """An opponent that uses Monte Carlo tree search with random rollouts (UCT), for games with perfect information."""

    name: Literal["mcts"] = "mcts"
    simulations: int = Field(default=100, ge=1)
    """The number of simulated games per move."""

    def check(self, game: Any) -> None:
        """Raise ConfigError if the game has hidden information or simultaneous moves, because the search would use hidden information."""
        kind, types = game.get_type(), spiel().GameType
        if (
            kind.information != types.Information.PERFECT_INFORMATION
            or kind.dynamics != types.Dynamics.SEQUENTIAL
        ):
            raise ConfigError(
                f"The opponent `mcts` sees the whole state, but {game} hides parts of it. Use `random`, `cfr` or `nash`."
            )

    def open(self, game: Any, seed: int) -> Choose:
        """Return the policy for one episode."""
        evaluator = spiel().RandomRolloutEvaluator(n_rollouts=1, seed=seed % 2**31)
        exploration, megabytes = 2.0, 64
        bot = spiel().MCTSBot(
            game, evaluator, exploration, self.simulations, megabytes, True, seed % 2**31, False
        )
        return lambda state, _player: int(bot.step(state))


class RegretOpponent(Settings):
    """An opponent that plays the average policy of counterfactual regret minimisation (CFR+, arXiv:1407.5042) in a small game."""

    name: Literal["cfr"] = "cfr"
    iterations: int = Field(default=200, ge=1)
    """The number of iterations of the solver, which runs once per process."""

    def check(self, game: Any) -> None:
        """Raise ConfigError if the game cannot be enumerated."""
        check_solvable(game, self.name)

    def open(self, game: Any, seed: int) -> Choose:
        """Return the policy for one episode. The first call in a process solves the game."""
        return play_table(regret_policy(str(game), self.iterations), seed)


class EquilibriumOpponent(Settings):
    """An opponent that plays an approximate Nash equilibrium of a small zero-sum game with two players."""

    name: Literal["nash"] = "nash"
    tolerance: float = Field(default=0.01, gt=0)
    """The maximum NashConv of the equilibrium: the total gain of both players from deviating, in units of utility."""

    def check(self, game: Any) -> None:
        """Raise ConfigError if the game is not a zero-sum game with two players or cannot be enumerated."""
        check_solvable(game, self.name)
        if game.num_players() != 2 or game.get_type().utility != spiel().GameType.Utility.ZERO_SUM:
            raise ConfigError(
                f"The opponent `nash` needs a zero-sum game with two players, which {game} is not. Use `cfr`."
            )

    def open(self, game: Any, seed: int) -> Choose:
        """Return the policy for one episode. The first call in a process solves the game."""
        return play_table(equilibrium(str(game), self.tolerance), seed)


_Kind = (
    RandomOpponent
    | ScriptedOpponent
    | HanabiOpponent
    | TreeSearchOpponent
    | RegretOpponent
    | EquilibriumOpponent
)
Opponent = Annotated[
    _Kind,
    Field(discriminator="name"),
    BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value),
]
"""Settings of an opponent: either its name, or a mapping such as `{name: mcts, simulations: 200}`."""


_OPPONENT: TypeAdapter[Opponent] = TypeAdapter(Opponent)


def opponent_named(player: str) -> Opponent:
    """Return an opponent by name, optionally with settings in brackets, such as `nash` or `mcts(simulations=200)`.

    Raises ConfigError for an unknown name or setting, for a value without the name of a setting, and for an unclosed bracket.
    """
    known = {kind.model_fields["name"].default: kind for kind in get_args(_Kind)}
    name = re.split(r"[()]", player)[0].strip()
    if name not in known:
        raise ConfigError(
            f"OpenSpiel has no player '{player}', and there is no such run or model folder.{did_you_mean(name, tuple(known))}"
        )
    inside = re.fullmatch(r"[^()]+(?:\((.*)\))?\s*", player)
    parts = [part.partition("=") for part in inside[1].split(",")] if inside and inside[1] else []
    settings = {key.strip(): value.strip() for key, _, value in parts}
    if (
        inside is None
        or not all(key.strip() and sign for key, sign, _ in parts)
        or len(settings) < len(parts)
    ):
        fields = [(key, field.default) for key, field in known[name].model_fields.items() if key != "name"]
        form = "".join(f"({key}={default or '…'})" for key, default in fields[:1])
        raise ConfigError(f"The player '{player}' cannot be read. Write {name}{form}.")
    try:
        return _OPPONENT.validate_python({"name": name, **settings})
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ConfigError(f"The player '{player}': {wrong['loc'][-1]}: {wrong['msg']}.") from error


def check_solvable(game: Any, opponent: str) -> None:
    """Raise ConfigError if the game has no information states or too many histories."""
    if not game.get_type().provides_information_state_string:
        raise ConfigError(
            f"The opponent `{opponent}` needs information states, but OpenSpiel has none for {game}. Use `random`."
        )
    count_decisions(str(game))


@cache
def count_decisions(written: str) -> int:
    """Return the number of histories of a game in which a player moves. Raises ConfigError if there are too many.

    The game is given as a string in OpenSpiel's notation, including parameters, because game objects of OpenSpiel cannot be
    compared for equality.
    """
    return sum(1 for _ in walk(spiel().load_game(written)))


@cache
def regret_policy(written: str, iterations: int) -> Chances:
    """Return the average policy of CFR+ after the given number of iterations. The result is cached."""
    solver = spiel().CFRPlusSolver(in_turns(spiel().load_game(written)))
    for _ in range(iterations):
        solver.evaluate_and_update_policy()
    return _table(written, solver)


@cache
def equilibrium(written: str, tolerance: float) -> Chances:
    """Return a policy with a NashConv of at most `tolerance`. The result is cached.

    Raises ConfigError if 20,000 iterations of CFR+ do not reach this NashConv.
    """
    game = in_turns(spiel().load_game(written))
    solver, done, burst = spiel().CFRPlusSolver(game), 0, 50
    while done < 20_000:
        for _ in range(burst):
            solver.evaluate_and_update_policy()
        done += burst
        if spiel().nash_conv(game, solver.average_policy()) <= tolerance:
            return _table(written, solver)
        burst = min(done, 2000)
    raise ConfigError(
        f"No policy with a NashConv of at most {tolerance} was found for {written}. Increase `tolerance`."
    )


def _table(written: str, solver: Any) -> Chances:
    """Return the average policy of a solver as a dictionary of numbers, which does not depend on the solver object."""
    policy = solver.average_policy()
    keys = {state.information_state_string() for state in walk(spiel().load_game(written))}
    return {key: dict(policy.action_probabilities(key)) for key in sorted(keys)}


def play_table(chances: Chances, seed: int) -> Choose:
    """Return a policy that samples its moves from the probabilities in a tabular policy."""
    draw = random.Random(seed)

    def choose(state: Any, player: int) -> int:
        key = str(state.information_state_string(player))
        if (
            state.is_simultaneous_node()
        ):  # the table belongs to `in_turns(game)`, whose states name the player
            key = f"Current player: {player}\n{key}"
        own = chances[key]
        return int(draw.choices(list(own), list(own.values()))[0])

    return choose
