"""OpenSpiel's games by name: loaded once, with the presets of the literature, and walked where they are small.

OpenSpiel (1908.09453) is an optional package; it is imported when the first game is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from kapelle.errors import ConfigError, did_you_mean

Value = bool | int | float | str
"""A parameter of a game."""

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
"""Sizes of Hanabi as in 1902.00506; `players` (2 to 5) and any other parameter may be set on top."""

MOST_NODES = 500_000
"""Most nodes of a game tree that is walked as a whole."""


def spiel() -> Any:
    """Return the module of OpenSpiel's games; ConfigError when it is not installed."""
    try:
        import pyspiel
    except ImportError as error:
        raise ConfigError(
            "The environment `openspiel` needs the package open_spiel, which is not installed. "
            "Install it with `pip install 'kapelle[games]'`."
        ) from error
    return pyspiel


def load_game(name: str, parameters: Mapping[str, Value], seed: int = 0) -> Any:
    """Return a game by OpenSpiel's name or a preset's.

    A name, a preset's too, may carry parameters as OpenSpiel writes them, `kuhn_poker(players=3)`; those of `parameters` go
    before them. `seed` matters to games whose chance OpenSpiel draws by itself. Raises ConfigError for an
    unknown game or parameter, with the closest known ones, and for parameters that make no game.
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
        raise ConfigError(
            f"environment.game names the unknown game '{short}'.{did_you_mean(short, [*_kinds(), *PRESETS])}"
        )
    for key in given:
        if key not in kind.parameter_specification:
            raise ConfigError(
                f"The game '{short}' has no parameter '{key}' (environment.parameters)."
                f"{did_you_mean(key, kind.parameter_specification)}"
            )
    if _samples_chance(kind):
        given["rng_seed"] = (int(given.get("rng_seed", 0)) + seed) % 2**31
    return _checked(short, given)


def _samples_chance(kind: Any) -> bool:
    return bool(kind.chance_mode == spiel().GameType.ChanceMode.SAMPLED_STOCHASTIC)


@cache
def _kinds() -> Mapping[str, Any]:
    return {kind.short_name: kind for kind in spiel().registered_games()}


def _checked(short: str, parameters: Mapping[str, Any]) -> Any:
    try:
        game = spiel().load_game(short, dict(parameters))
    except spiel().SpielError as error:
        raise ConfigError(
            f"OpenSpiel makes no game '{short}' with environment.parameters {dict(parameters)}: {error}."
        ) from error
    kind = game.get_type()
    if kind.dynamics == spiel().GameType.Dynamics.MEAN_FIELD:
        raise ConfigError(f"'{short}' is a mean-field game: it has a population, no players. Take another.")
    if not (kind.provides_information_state_string or kind.provides_observation_string):
        raise ConfigError(f"OpenSpiel has no words for what players of '{short}' see. Take another game.")
    return game


def walk(game: Any) -> Iterator[Any]:
    """Yield every state in which a player moves, once for each history.

    Raises ConfigError for games with simultaneous moves, chance that is not stated, or more than
    `MOST_NODES` nodes.
    """
    kind = game.get_type()
    types = spiel().GameType
    if kind.dynamics != types.Dynamics.SEQUENTIAL or kind.chance_mode == types.ChanceMode.SAMPLED_STOCHASTIC:
        raise ConfigError(
            f"The game {game} cannot be solved exactly: only games in which players move one at a time and "
            "chance is stated can. Take kuhn_poker, leduc_poker, tiny_hanabi or liars_dice."
        )
    waiting, seen = [game.new_initial_state()], 0
    while waiting:
        state = waiting.pop()
        seen += 1
        if seen > MOST_NODES:
            raise ConfigError(
                f"The game {game} has more than {MOST_NODES} nodes, too many to solve exactly. Take a smaller one, "
                "or the opponents `random` or `mcts`."
            )
        if state.is_terminal():
            continue
        if not state.is_chance_node():
            yield state
        waiting.extend(state.child(action) for action in reversed(state.legal_actions()))
