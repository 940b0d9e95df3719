"""Implements `kapelle serve`, which serves a trained team, a verifier, environments or a base model to other programs."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import ValidationError

from kapelle.cli.named import environment_named, owner_of
from kapelle.cli.parser import split_words
from kapelle.cli.quiet import hush
from kapelle.environment import Environment, RewardsEpisodes, offers
from kapelle.errors import ConfigError, KapelleError, did_you_mean
from kapelle.runs.named_checkpoint import split_run
from kapelle.runs.reader import is_run, read_config
from kapelle.runtime.console import say
from kapelle.runtime.interrupts import catch_interrupts, unbroken
from kapelle.services.binding import TOKEN, Binding, check_installed
from kapelle.settings.base import Settings
from kapelle.setup.team_file import TEAM_FILE, is_team, vllm_commands
from kapelle.training.console import Lines, Watch

if TYPE_CHECKING:
    from kapelle.services.reward.scores import Scorer


def binding_of(arguments: argparse.Namespace) -> Binding:
    """Return the address, the TLS files and the host names that the arguments specify.

    Raises ConfigError for a binding that is not allowed.
    """
    return Binding(
        arguments.host,
        arguments.port,
        os.environ.get(TOKEN),
        file_of(arguments.tls_cert),
        file_of(arguments.tls_key),
        tuple(arguments.allow_host),
    )


def file_of(name: str | None) -> Path | None:
    """Return the path of the file that an argument names, or None if the argument is None."""
    return None if name is None else Path(name)


KINDS = ("policy", "reward", "environments", "openenv", "tinker")
DRAIN_SECONDS = 600.0
"""Maximum time in seconds for finishing accepted calls after a signal."""


class Drains(Protocol):
    """The interface of a listening server for chat completions, scores or environments."""

    def drain(self, seconds: float) -> bool:
        """Reject new calls, finish the accepted calls, and return whether all of them finished within `seconds`."""
        ...


D = TypeVar("D", bound=Drains)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal arrives. After the signal, accepted calls are finished and the exit code of the signal is returned."""
    named, settings = split_words(arguments.words)
    if len(named) == 1 and named[0] not in KINDS and _plays(split_run(named[0])[0]):
        named = ("policy", named[0])  # the default for a run
    if named == ("environments",):
        arguments.port = 50_051 if arguments.port is None else arguments.port
        return serve_environment(arguments, settings)
    arguments.port = 8000 if arguments.port is None else arguments.port
    if len(named) == 2 and named[0] == "tinker":
        return _tinker(named[1], settings, binding_of(arguments), arguments)
    if len(named) == 2 and named[0] == "openenv":
        return _openenv(named[1], settings, binding_of(arguments))
    if len(named) != 2 or named[0] not in KINDS or settings:
        hint = did_you_mean(named[0], KINDS) if named and named[0] not in KINDS else ""
        if len(named) == 1 and named[0] not in KINDS:
            hint = f" '{named[0]}' is neither a run nor an exported team.{hint}"
        raise ConfigError(
            "Give what to serve and a run directory: `kapelle serve policy RUN` or `kapelle serve reward (RUN | MODEL)`. Environments "
            "need names: `kapelle serve environments --environments NAMES` or `kapelle serve openenv NAME`. A base model for "
            f"Tinker's clients: `kapelle serve tinker MODEL`.{hint}"
        )
    if arguments.print is not None:
        return _print_vllm(named[0], Path(named[1]), arguments.port)
    check_installed(
        "serve", "starlette", "uvicorn", *(("grpc", "grpc_health") if named[0] == "reward" else ())
    )
    from kapelle.services.http import check_free

    binding = binding_of(arguments)
    folder, which = split_run(named[1])
    playable = named[0] == "policy" and is_team(folder)
    if not playable and (named[0] == "policy" or not (folder / "config.json").is_file()):
        read_config(folder)  # raises when there is no run
    check_free(binding)
    if named[0] == "reward" and arguments.grpc_port:
        check_free(replace(binding, port=arguments.grpc_port))
    hush()
    if named[0] == "reward":
        return _reward(folder, binding, arguments)
    return _policy(folder, which, binding, arguments)


def _plays(folder: Path) -> bool:
    """Return whether a folder is a run or an exported team."""
    return is_team(folder) or is_run(folder)


def _print_vllm(kind: str, folder: Path, port: int) -> int:
    """Print the commands with which vLLM serves the agents of an exported team."""
    if kind != "policy" or not is_team(folder):
        raise ConfigError(
            f"--print vllm needs a team that `kapelle export RUN --out {folder}` wrote, but {TEAM_FILE} is missing. Give such a "
            "folder: `kapelle serve policy FOLDER --print vllm`."
        )
    for command in vllm_commands(folder, port):
        say(command)
    return 0


def _policy(folder: Path, which: str | None, binding: Binding, arguments: argparse.Namespace) -> int:
    from kapelle.services.policy.recording import EpisodeFile
    from kapelle.services.policy.service import ServingLimits, serve_policy
    from kapelle.training.served import open_served

    record = file_of(arguments.record)
    if record is not None:
        EpisodeFile(record, ()).close()  # raises where it cannot be written, before anything is loaded
    embedder = None
    if arguments.embedder is not None:
        check_installed("embed", "sentence_transformers")
        from kapelle.services.policy.embeddings import Embedder

        embedder = Embedder(arguments.embedder)
    served = open_served(folder, Watch(Lines(sys.stderr)), which=which)
    name = (arguments.name or served.config.name).replace("/", "-")  # clients write TEAM/AGENT
    limits = ServingLimits(arguments.calls, arguments.timeout, arguments.idle)
    return until_stopped(
        serve_policy(served.setup, name, binding, limits, record, arguments.tool_form, embedder),
        lambda server: f"{name} is served at {server.url}/v1 as {', '.join(server.models)}",
    )


def _reward(folder: Path, binding: Binding, arguments: argparse.Namespace) -> int:
    from kapelle.services.reward.service import RewardLimits, serve_reward

    if arguments.record is not None:
        raise ConfigError("--record is for `kapelle serve policy`. Remove it.")
    scorer: Scorer
    if (folder / "config.json").is_file():
        from kapelle.services.reward.scores import open_reward_model

        scorer = open_reward_model(folder, arguments.name)
    else:
        from kapelle.services.reward.scores import verifier_scorer
        from kapelle.training.served import open_verifier

        scorer = verifier_scorer(*open_verifier(folder, Watch(Lines(sys.stderr)), arguments.name))
    limits = RewardLimits(arguments.calls, arguments.batch, arguments.timeout)
    return until_stopped(
        serve_reward(scorer, binding, limits, arguments.grpc_port),
        lambda server: (
            f"{scorer.about['name']} scores at {server.url}/v1/score"
            + (f" and, over gRPC, at {server.grpc.address}" if server.grpc else "")
        ),
    )


def _openenv(name: str, settings: Sequence[str], binding: Binding) -> int:
    check_installed("serve", "starlette", "uvicorn", "websockets")
    from kapelle.rollout.conformance.driving import accepts
    from kapelle.services.environments.openenv import serve_openenv
    from kapelle.services.http import check_free

    environment = environment_named(name, settings)
    if offers(environment, RewardsEpisodes):
        raise ConfigError(
            f"`{environment.name}` rewards whole episodes, which OpenEnv does not support. Serve the environment that provides its questions."
        )
    teams = (tuple(f"agent_{k}" for k in range(size)) for size in range(1, 9))
    # If none of these fits, the environment's `check` raises the reason.
    agents = next((names for names in teams if accepts(environment, names)), ("agent_0",))
    check_free(binding)
    hush()
    return until_stopped(
        serve_openenv(environment, agents, binding),
        lambda server: (
            f"{environment.name} is served to OpenEnv's clients at {server.url}, for {', '.join(agents)}"
        ),
    )


def _tinker(path: str, settings: Sequence[str], binding: Binding, arguments: argparse.Namespace) -> int:
    """Serve a base model to the clients of Tinker's protocol."""
    check_installed("serve", "starlette", "uvicorn", "google.protobuf")
    from kapelle.services.http import check_free
    from kapelle.services.tinker.service import TinkerLimits, read_keys, serve_tinker
    from kapelle.settings.messages import made
    from kapelle.settings.overlays import merge, parse_setting
    from kapelle.settings.schema import ModelConfig

    values: dict[str, Any] = {"path": path}
    for setting in settings:
        section = parse_setting(setting)
        if section.keys() != {"model"} or not isinstance(section["model"], dict):
            raise ConfigError(f"'{setting}' is not a setting of the model. Write model.key=value.")
        merge(values, section["model"], setting, {})
    config = made(ModelConfig, values, "model")
    keys = None if arguments.keys is None else read_keys(Path(arguments.keys), binding.host)
    check_free(binding)
    hush()
    from kapelle.models.language_model import load_language_model

    model = load_language_model(config, trained=False)
    limits = TinkerLimits(requests=arguments.calls, adapters=arguments.adapters, idle=arguments.idle)
    name, folder = arguments.name or path, Path(arguments.folder)
    return until_stopped(
        serve_tinker(model, name, folder, binding, limits, keys),
        lambda server: (
            f"{name} is served to Tinker's clients at {server.url} (TINKER_BASE_URL); weights are saved in {folder}"
        ),
    )


def until_stopped(
    serving: AbstractContextManager[D], where: Callable[[D], str], seconds: float = DRAIN_SECONDS
) -> int:
    """Run the server and print its address. After a signal, drain the server and return the exit code of the signal."""
    stop = threading.Event()
    with catch_interrupts(lambda _: stop.set()) as stopped, unbroken(), serving as server:
        say(where(server))
        stop.wait()
        say("stopping: accepted calls are answered first", sys.stderr)
        server.drain(seconds)
    return stopped.exit_code


# -------- `kapelle serve environments`: serve environments to runs on any machine, and replace one while they sample

SHORT = {"debate": "debate_topics"}
"""Mapping from a common name of an environment to its name in kapelle."""
HOW = "`kapelle serve environments --environments math,kuhn=recipes/kuhn.yaml math.path=data/gsm8k`"


def serve_environment(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    """Serve environments until a signal arrives, or replace an environment on a running server."""
    check_installed("serve", "starlette", "uvicorn", "websockets")
    if arguments.replace is not None:
        return _replace(arguments, settings)
    if not arguments.environments:
        raise ConfigError(f"Name the environments to serve: {HOW}.")
    binding = binding_of(arguments)
    environments = named(arguments.environments, settings)
    from kapelle.services.environments.host import SessionLimits
    from kapelle.services.environments.service import serve_environments

    limits = SessionLimits(arguments.sessions, arguments.timeout)
    return until_stopped(
        serve_environments(environments, binding, limits, processes=arguments.workers),
        lambda server: f"{', '.join(environments)} served at {server.address}",
        2 * arguments.drain,  # half of it for episodes, half for the remaining calls
    )


def named(listed: str, settings: Sequence[str]) -> dict[str, Environment]:
    """Return the environments in a list of entries `name` or `name=what`, configured with the settings `name.key=value`."""
    specs: dict[str, str] = {}
    for each in listed.split(","):
        name, given, what = each.strip().partition("=")
        name = name if given or not name.endswith((".yaml", ".yml")) else Path(name).stem
        what = what or each.strip()
        if not name or name in specs:
            raise ConfigError(
                f"`{listed}` contains {f'the name {name!r} twice' if name else 'an entry without a name'}. Write {HOW}."
            )
        specs[name] = SHORT.get(what, what)
    for setting in settings:
        owner = owner_of(setting, specs)
        if owner is None:
            name = setting.partition(".")[0]
            raise ConfigError(
                f"The setting `{setting}` is for an environment that is not served.{did_you_mean(name, list(specs))}"
            )
    found = {}
    for name, what in specs.items():
        own = [f"environment.{each[len(name) + 1 :]}" for each in settings if owner_of(each, specs) == name]
        try:
            found[name] = environment_named(what, own)
        except KapelleError as error:
            raise type(error)(f"Environment '{name}': {error}") from None
        if offers(found[name], RewardsEpisodes):
            raise ConfigError(
                f"Environment '{name}' rewards whole episodes, which a server cannot do. Use it directly as the run's environment."
            )
    return found


def _replace(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    """Replace an environment on a running server. Runs that use the server get the new environment from their next episode on."""
    if arguments.at is None:
        raise ConfigError(
            "--replace needs the address of the running server. Add it, such as --at localhost:50051."
        )
    from kapelle.environments.remote import Remote

    try:
        server = Remote(address=(arguments.at,), certificate=arguments.certificate, retry_seconds=0)
    except ValidationError as error:
        raise ConfigError(f"The server cannot be called: {error.errors()[0]['msg']}.") from None
    for name, environment in named(arguments.replace, settings).items():
        assert isinstance(environment, Settings), "recipes and names give settings"
        values = environment.model_dump(mode="json")
        version = server.register(name, values)
        say(f"{name} at {arguments.at} is now version {version}")
    return 0
