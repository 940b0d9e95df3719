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
    from kapelle.setup.recipe import builtin_recipes, lay_over, load_recipe

    config: RunConfig
    if name in builtin_recipes() or name.endswith((".yaml", ".yml")):
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


def _check_game(name: str) -> None:
    from kapelle.environments.openspiel.games import load_game
    from kapelle.setup.recipe import builtin_recipes

    try:
        load_game(name, {})
    except KapelleError as error:
        known = [*environments.BUILTIN, *builtin_recipes()]
        raise ConfigError(
            f"'{name}' is not an environment, recipe or run directory.{did_you_mean(name, known)} As a game: {error}"
        ) from error
