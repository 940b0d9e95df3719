"""Environments by the names that people type: their own, a recipe's, or a game's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kapelle import environments
from kapelle.environment import Answerable, Environment, environment_class
from kapelle.errors import ConfigError, KapelleError, did_you_mean

if TYPE_CHECKING:
    from kapelle.settings.schema import RunConfig


def environment_named(name: str, settings: Sequence[str]) -> Environment:
    """Return an environment by its own name, that of a recipe, or that of a game of OpenSpiel.

    `settings` are `environment.key=value`. ConfigError for a name that is none of these.
    """
    from kapelle.setup.recipe import lay_over, load_recipe

    config: RunConfig
    if is_recipe(name):
        config = load_recipe(name, (), tuple(settings)).config
    else:
        values: dict[str, Any] = {"name": "openspiel", "game": name}
        if name in environments.BUILTIN or ":" in name:
            values = {"name": name}
        else:
            _check_game(name)
        workflow = "solo" if issubclass(environment_class(values["name"]), Answerable) else "play"
        whole = {"environment": values, "workflow": {"name": workflow}, "algorithm": {"name": "grpo"}}
        config = lay_over([("kapelle play", whole)], tuple(settings)).config
    return config.environment


def is_recipe(name: str) -> bool:
    """Return whether a name is that of a built-in recipe, or of a YAML file."""
    from kapelle.setup.recipe import builtin_recipes

    return name in builtin_recipes() or name.endswith((".yaml", ".yml"))


def _check_game(name: str) -> None:
    from kapelle.environments.openspiel.games import load_game
    from kapelle.setup.recipe import builtin_recipes

    try:
        load_game(name, {})
    except KapelleError as error:
        hint = did_you_mean(name, [*environments.BUILTIN, *builtin_recipes()])
        unknown = f"'{name}' is not an environment, recipe or run directory"
        if isinstance(error.__cause__, ImportError) and "Did you mean" not in hint:
            raise ConfigError(f"{error} Without its games, {unknown}.") from error
        raise ConfigError(f"{unknown}.{hint} As a game: {error}") from error
