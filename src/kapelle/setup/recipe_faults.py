"""Faults of a recipe that are found before its values are checked: a word that names none, a class that lacks something."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from kapelle.engines.rollout.protocol import EngineSettings
from kapelle.engines.train.protocol import TrainEngineSettings
from kapelle.environment import Environment
from kapelle.errors import ConfigError, did_you_mean
from kapelle.runs.reader import is_run, tag_hint
from kapelle.settings.base import Settings
from kapelle.settings.messages import settings_named
from kapelle.settings.schema import RunConfig
from kapelle.settings.sections import AlgorithmSettings
from kapelle.workflow import Workflow

_CONTRACTS = {
    "environment": Environment,
    "workflow": Workflow,
    "algorithm": AlgorithmSettings,
    "engine": EngineSettings,
    "train_engine": TrainEngineSettings,
}
"""Section → what its class has to offer."""


def no_recipe(word: str, recipes: Iterable[str]) -> ConfigError:
    """Return the error for a word that names no recipe: a setting without its value, a run, a folder, a misspelling."""
    path = Path(word)
    if is_run(path):
        return ConfigError(
            f"'{word}' is a run. Continue it with `kapelle train --resume {word}`; its settings alone are {path / 'config.yaml'}."
        )
    if tag_hint(path):
        return ConfigError(
            f"'{word}' is a checkpoint of a run. Begin another run with its weights: `kapelle train RECIPE --start-from {word}`."
        )
    if path.is_dir():
        return ConfigError(f"'{word}' is a folder. Name the YAML file in it that is the recipe.")
    if path.suffix == ".json":
        return ConfigError(f"Recipe file {word} cannot be read: No such file or directory.")
    key = re.match(r"[A-Za-z_][\w.]*", word)
    if (
        key is not None
        and not re.fullmatch(r"\w+", word)
        and key[0].partition(".")[0] in RunConfig.model_fields
    ):
        return ConfigError(
            f"'{word}' is neither a recipe nor a setting, which has no spaces: write {key[0].rstrip('.')}=VALUE."
        )
    hint = did_you_mean(word, recipes)
    named = [] if hint.startswith(" Did you mean") else settings_named(word)
    if named:
        hint = f" Did you mean the setting {named[0]}=VALUE?"
    elif not hint.startswith(" Did you mean"):
        hint += " `kapelle recipes ls` lists them; a recipe of your own is a YAML file."
    return ConfigError(f"Unknown recipe '{word}'.{hint}")


def check_class(section: str, name: str, found: type) -> None:
    """Raise ConfigError for a class that is no settings, or lacks what its section asks of it."""
    if not issubclass(found, Settings):
        raise ConfigError(f"The {section} '{name}' must be a subclass of kapelle.Settings.")
    parts = [part for part in vars(_CONTRACTS[section]) if not part.startswith("_")]
    missing = [part for part in parts if not hasattr(found, part) and part not in found.model_fields]
    if missing:
        raise ConfigError(
            f"The {section} '{name}' has no `{'`, no `'.join(missing)}`. Add what is missing to the class "
            f"{found.__name__}; docs/make_your_own.md shows one."
        )
