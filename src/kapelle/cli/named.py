"""Resolves names on the command line: players (a checkpoint of a run, or a model) and environments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kapelle.cli.parser import split_words
from kapelle.environment import Environment
from kapelle.errors import ConfigError
from kapelle.runs.named_checkpoint import split_run
from kapelle.runs.reader import is_run, read_config
from kapelle.runtime.console import say
from kapelle.setup.team_file import is_team
from kapelle.training.console import Lines, Watch

if TYPE_CHECKING:
    from kapelle.rollout.evaluation.evaluate import Returns
    from kapelle.rollout.setup import RolloutSetup
    from kapelle.settings.schema import RunConfig


MAY_CHANGE = ("environment.", "evaluation.", "episode.")
"""The settings of a run that may be changed for an evaluation."""


@dataclass(frozen=True, slots=True)
class Player:
    """A team with its weights in memory."""

    name: str
    """The run or the model, as it was named on the command line."""
    setup: RolloutSetup
    config: RunConfig
    returns: Returns
    """The settings that determine how returns are computed from rewards."""
    steps: int | None
    """The number of training steps of the weights, or None for a model."""


def open_player(arguments: argparse.Namespace) -> Player:
    """Load the player that the arguments name. Raises ConfigError unless the arguments name either a run or a model."""
    from kapelle.runs.definitions import own_returns

    named, settings = split_words(arguments.words)
    if arguments.model is None and len(named) == 1 and is_model(named[0], arguments.environment):
        # A folder without a run in it holds a model or an adapter.
        if arguments.environment is None:
            raise ConfigError(f"{named[0]} is a model, not a run. Add --environment NAME.")
        arguments.model, named = named[0], ()
    if arguments.model is None:
        if len(named) != 1 or arguments.environment is not None:
            raise ConfigError("Give one run directory, or --model PATH and --environment NAME.")
        if arguments.real:
            raise ConfigError("--real applies only to a recipe that a model plays, not to a run. Remove it.")
        return _from_run(named[0], settings)
    if named or arguments.environment is None:
        raise ConfigError(
            "--model needs --environment NAME. Add it, and remove the run directory if there is one."
        )
    from kapelle.rollout.evaluation.playing import model_config, open_rollout_setup

    config = model_config(
        arguments.model,
        arguments.environment,
        settings,
        real=arguments.real,
        report=lambda note: say(note, sys.stderr),
    )
    return Player(arguments.model, open_rollout_setup(config), config, own_returns, None)


def check_playable(arguments: argparse.Namespace, environment: str | None) -> None:
    """Check a model's environment before anything is loaded. Raises ConfigError if the arguments do not name a model."""
    from kapelle.rollout.evaluation.playing import model_config

    named, settings = split_words(arguments.words)
    model = arguments.model or next((name for name in named if is_model(name, environment)), None)
    if model is None or environment is None:
        raise ConfigError(
            "Several environments need --model PATH, because a run plays only what it was trained on."
        )
    model_config(model, environment, settings, real=arguments.real)


def is_model(name: str, environment: str | None = None) -> bool:
    """Return whether a folder holds a model or a PEFT adapter and is not a run.

    An exported team of one policy counts as a model only if `environment` is given.
    """
    if is_run(split_run(name)[0]) or (environment is None and is_team(Path(name))):
        return False
    return any((Path(name) / file).is_file() for file in ("config.json", "adapter_config.json"))


def check_changeable(settings: Sequence[str]) -> None:
    """Raise ConfigError for a setting that cannot be changed after training."""
    for setting in settings:
        if not setting.startswith(MAY_CHANGE):
            raise ConfigError(
                f"'{setting}' cannot be changed after training. Set keys of `environment`, `evaluation` and `episode`."
            )


def _from_run(path: str, settings: tuple[str, ...]) -> Player:
    from kapelle.runs.definitions import own_returns
    from kapelle.training.trainer import Trainer

    check_changeable(settings)
    folder, which = split_run(path)
    observer = Watch(Lines(sys.stderr))
    if is_team(folder):
        from kapelle.setup.team_builder import build_algorithm
        from kapelle.training.served import open_served

        served = open_served(folder, observer, settings, which)
        shares = build_algorithm(served.config).returns or own_returns
        return Player(path, served.setup, served.config, shares, served.step)
    read_config(folder)  # raises when there is no run
    trainer = Trainer.from_run(path, *settings, observer=observer)
    returns = trainer.algorithm.returns or own_returns
    return Player(path, trainer.setup, trainer.config, returns, trainer.done)


def owner_of(setting: str, names: Iterable[str]) -> str | None:
    """Return the name of the environment to which a setting `name.key=value` applies, or None if it applies to none of them."""
    return max((name for name in names if setting.startswith(f"{name}.")), key=len, default=None)


def environment_named(name: str, settings: Sequence[str]) -> Environment:
    """Return the environment with the given name, which may also be the name of a recipe or of an OpenSpiel game.

    The argument `settings` contains strings of the form `environment.key=value`. Raises ConfigError for any other name.
    """
    from kapelle.comparison.contestants import config_of_game

    return config_of_game(name, settings).environment


def is_recipe(name: str) -> bool:
    """Return whether a name is the name of a built-in recipe or of a YAML file."""
    from kapelle.setup.recipe import builtin_recipes

    return name in builtin_recipes() or name.endswith((".yaml", ".yml"))
