"""Who plays in `eval` and `collect`: the newest checkpoint of a run, or a model as it is."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kapelle.cli.output import say
from kapelle.cli.parser import split_words
from kapelle.cli.progress import Lines, Watch
from kapelle.errors import ConfigError
from kapelle.runs.named_checkpoint import split_run
from kapelle.runs.reader import read_config

if TYPE_CHECKING:
    from kapelle.evaluation.evaluate import Returns
    from kapelle.rollout.play import Play
    from kapelle.settings.schema import RunConfig

MAY_CHANGE = ("environment.", "evaluation.", "episode.")
"""Settings of a run that affect what is played, not what was trained."""


@dataclass(frozen=True, slots=True)
class Player:
    """A team with its weights in memory."""

    name: str
    """What was named on the command line."""
    play: Play
    config: RunConfig
    returns: Returns
    """How the team's reward is shared."""
    steps: int | None
    """Steps of training behind the weights; None for a model."""


def open_player(arguments: argparse.Namespace) -> Player:
    """Return who plays; raises ConfigError unless either a run or a model is named."""
    from kapelle.metrics.definitions import own_returns

    named, settings = split_words(arguments.words)
    if arguments.model is None:
        if len(named) != 1 or arguments.environment is not None:
            raise ConfigError("Name one run directory, or --model PATH and --environment NAME.")
        if arguments.real:
            raise ConfigError("--real is for a recipe that a model plays; a run plays as it was trained.")
        return _from_run(named[0], settings)
    if named or arguments.environment is None:
        raise ConfigError("--model goes with --environment NAME, and without a run directory.")
    from kapelle.evaluation.playing import model_config, open_play

    config = model_config(
        arguments.model, arguments.environment, settings, real=arguments.real, report=_print_note
    )
    return Player(arguments.model, open_play(config), config, own_returns, None)


def _print_note(note: str) -> None:
    say(note, sys.stderr)


def _from_run(path: str, settings: tuple[str, ...]) -> Player:
    from kapelle.metrics.definitions import own_returns
    from kapelle.training.trainer import Trainer

    read_config(split_run(path)[0])  # raises when there is no run
    for setting in settings:
        if not setting.startswith(MAY_CHANGE):
            raise ConfigError(
                f"'{setting}' would change what was trained. For a run, set keys of `environment`, `evaluation` and `episode`."
            )
    trainer = Trainer.from_run(path, *settings, observer=Watch(Lines(sys.stderr)))
    returns = trainer.algorithm.returns or own_returns
    return Player(path, trainer.play, trainer.config, returns, trainer.done)
