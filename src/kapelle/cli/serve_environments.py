"""`kapelle serve environments`: offer worlds to runs on this and other machines, and replace one while they play."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from kapelle.cli.environments import environment_named
from kapelle.cli.listening import binding_of
from kapelle.cli.output import say
from kapelle.cli.serve_arguments import WORLD_IDLE
from kapelle.environment import Environment, pays_episodes
from kapelle.errors import ConfigError, KapelleError, did_you_mean
from kapelle.settings.base import Settings

SHORT = {"debate": "debate_topics"}
"""Names that people use → the environment's own."""
HOW = "`kapelle serve environments --environments math,kuhn=recipes/kuhn.yaml math.path=data/gsm8k`"


def run(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    """Serve environments until a signal asks to stop, or replace one on a server that runs."""
    from kapelle.services.grpc.installed import check_installed

    check_installed()
    if arguments.replace is not None:
        return _replace(arguments, settings)
    if not arguments.environments:
        raise ConfigError(f"Name the environments to serve: {HOW}.")
    binding = binding_of(arguments)
    environments = named(arguments.environments, settings)
    from kapelle.cli.serve import until_stopped
    from kapelle.services.environments.serving import SessionLimits, serve_environments

    limits = SessionLimits(arguments.sessions, arguments.idle or WORLD_IDLE, arguments.timeout)
    return until_stopped(
        serve_environments(environments, binding, limits, processes=arguments.workers),
        lambda server: f"{', '.join(environments)} served at {server.address}",
        2 * arguments.drain,  # half of it for episodes, half for the calls that are left
    )


def named(listed: str, settings: Sequence[str]) -> dict[str, Environment]:
    """Return the environments of a list `name` or `name=what`, with settings `name.key=value`."""
    specs: dict[str, str] = {}
    for each in listed.split(","):
        name, given, what = each.strip().partition("=")
        name = name if given or not name.endswith((".yaml", ".yml")) else Path(name).stem
        what = what or each.strip()
        if not name or name in specs:
            raise ConfigError(
                f"`{listed}` names '{name}' {'twice' if name else 'without a name'}. Write {HOW}."
            )
        specs[name] = SHORT.get(what, what)
    for setting in settings:
        owner = _owner(setting, specs)
        if owner is None:
            name = setting.partition(".")[0]
            raise ConfigError(
                f"The setting `{setting}` belongs to no environment that is served.{did_you_mean(name, list(specs))}"
            )
    found = {}
    for name, what in specs.items():
        own = [f"environment.{each[len(name) + 1 :]}" for each in settings if _owner(each, specs) == name]
        try:
            found[name] = environment_named(what, own)
        except KapelleError as error:
            raise type(error)(f"Environment '{name}': {error}") from None
        if pays_episodes(found[name]):
            raise ConfigError(
                f"Environment '{name}' pays whole episodes where the agents are played, not where its worlds live. Name it as "
                "the run's own environment instead of serving it."
            )
    return found


def _owner(setting: str, names: Mapping[str, str]) -> str | None:
    """Return the environment that a setting `name.key=value` is for."""
    return max((name for name in names if setting.startswith(f"{name}.")), key=len, default=None)


def _replace(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    """Put an environment on a server that runs; runs that play it go over to it with their next episodes."""
    if arguments.at is None:
        raise ConfigError(
            "--replace puts an environment on a server that runs. Name it: --at localhost:50051."
        )
    from kapelle.environments.remote.server import register

    for name, environment in named(arguments.replace, settings).items():
        assert isinstance(environment, Settings), "recipes and names give settings"
        values = json.dumps(environment.model_dump(mode="json"))
        version = register(arguments.at, name, values, arguments.certificate)
        say(f"{name} at {arguments.at} is version {version} now")
    return 0
