"""Represents an environment as plain data, from which another process creates an equal environment.

The data are the name of the class of the environment and its settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pydantic

from kapelle.environment import (
    DrivenByPrograms,
    Environment,
    OpensStates,
    RewardsEpisodes,
    UsesModels,
    environment_class,
    offers,
)
from kapelle.errors import ConfigError
from kapelle.settings.base import Settings
from kapelle.settings.checks import RunToCheck
from kapelle.settings.environments import text_alone
from kapelle.settings.schema import timed


def check_workers(run: RunToCheck) -> Iterator[str]:
    """Yield the reasons why episode states cannot be kept in worker processes.

    Raises ConfigError if the worker processes cannot create the environment.
    """
    environment = run.config.environment
    if not run.config.episode.environment_workers:
        return
    yield from text_alone(run, "`episode.environment_workers`")
    if run.training and offers(environment, DrivenByPrograms):
        yield "`episode.environment_workers` is not supported for episodes of an outside program. Set it to 0."
    models = environment.frozen_models if offers(environment, UsesModels) else ()
    if models and not offers(environment, RewardsEpisodes):
        yield (
            f"Episodes of `{environment.name}` use '{models[0].path}', a model in this process. Set "
            "`episode.environment_workers: 0`, or use an endpoint for this model."
        )
    if offers(environment, OpensStates):
        yield f"The states of `{environment.name}` episodes are on its servers. Set `episode.environment_workers: 0`."
    else:
        environment_form(environment)


def environment_form(environment: Environment) -> dict[str, Any]:
    """Return the JSON form of an environment, which `environment_from` converts back to an environment.

    Raises ConfigError if another process could not import the class of the environment, or would create a different
    environment.
    """
    if not isinstance(environment, Settings):
        raise ConfigError(f"The environment '{environment.name}' must be a subclass of kapelle.Settings.")
    settings = environment.model_dump(mode="json")
    form = {"class": _importable_name(environment, settings.get("name")), "settings": settings}
    try:
        made = environment_from(form)
        same = isinstance(made, Settings) and made.model_dump(mode="json") == settings
    except (pydantic.ValidationError, ConfigError) as error:
        raise _not_importable(environment, f"cannot be created from its settings: {error}") from None
    if not same:
        raise _not_importable(environment, "differs when it is created again from its settings")
    return form


def environment_from(form: Mapping[str, Any]) -> Environment:
    """Create the environment that the JSON form describes."""
    kind = environment_class(form["class"])
    if "timeout" in form["settings"]:
        kind = timed(kind, "environment")
    made: Environment = kind.model_validate(form["settings"])  # type: ignore[attr-defined]
    return made


def _importable_name(environment: Settings, name: object) -> str:
    """Return a name by which other processes can find the class of the environment."""
    own = type(environment)
    found = f"{own.__module__}:{own.__qualname__}"
    if own.__module__ == "__main__" or "<locals>" in own.__qualname__:
        raise _not_importable(environment, "is defined in a function or in the main program")
    for each in (name, found):
        try:
            if isinstance(each, str) and _is(own, environment_class(each)):
                return each
        except ConfigError:  # another class has this name
            pass
    raise _not_importable(environment, f"is not what `{found}` imports")


def _is(own: type, found: type) -> bool:
    """Return whether two classes are the same, ignoring the fields that `timed` adds."""
    return issubclass(own, found) and (own.__module__, own.__qualname__) == (
        found.__module__,
        found.__qualname__,
    )


def _not_importable(environment: Settings, why: str) -> ConfigError:
    kind = type(environment)
    return ConfigError(
        f"`episode.environment_workers` needs an importable environment, but {kind.__qualname__} {why}. "
        "Define it in a module and refer to it as `module:Class`, or set `episode.environment_workers: 0`."
    )
