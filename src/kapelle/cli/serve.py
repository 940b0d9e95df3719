"""`kapelle serve`: offer what a run has learned to other programs."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from kapelle.cli.lines import Lines
from kapelle.cli.listening import binding_of, file_of
from kapelle.cli.output import say
from kapelle.cli.parser import split_words
from kapelle.cli.progress import Watch
from kapelle.cli.quiet import hush
from kapelle.cli.serve_arguments import SESSION_IDLE
from kapelle.errors import ConfigError, did_you_mean
from kapelle.runs.best import split_run
from kapelle.runs.reader import read_config
from kapelle.runtime.interrupts import catch_interrupts, unbroken

if TYPE_CHECKING:
    from kapelle.services.binding import Binding
    from kapelle.services.reward.scores import Scorer

KINDS = ("policy", "reward", "environments")
DRAIN_SECONDS = 600.0
"""For which accepted calls may still be answered after a signal."""


class Drains(Protocol):
    """A server that listens."""

    def drain(self, seconds: float) -> bool:
        """Accept no more calls, answer those that were accepted, and return whether all were within `seconds`."""
        ...


D = TypeVar("D", bound=Drains)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal asks to stop; then answer what was accepted and return the signal's exit code."""
    named, settings = split_words(arguments.words)
    if named == ("environments",):
        from kapelle.cli.serve_environments import run as serve_environments

        arguments.port = 50_051 if arguments.port is None else arguments.port
        return serve_environments(arguments, settings)
    arguments.port = 8000 if arguments.port is None else arguments.port
    if len(named) != 2 or named[0] not in KINDS or settings:
        hint = did_you_mean(named[0], KINDS) if named and named[0] not in KINDS else ""
        raise ConfigError(
            f"Name what to serve and a run directory: `kapelle serve policy RUN` or `kapelle serve reward (RUN | MODEL)`.{hint}"
        )
    from kapelle.services.http.server import check_free, check_installed

    check_installed()
    binding = binding_of(arguments)
    folder, which = split_run(named[1])
    if named[0] == "policy" or not (folder / "config.json").is_file():
        read_config(folder)  # raises when there is no run
    check_free(binding)
    if named[0] == "reward" and arguments.grpc_port:
        check_free(replace(binding, port=arguments.grpc_port))
    hush()
    if named[0] == "reward":
        return _reward(folder, binding, arguments)
    return _policy(folder, which, binding, arguments)


def _policy(folder: Path, which: str | None, binding: Binding, arguments: argparse.Namespace) -> int:
    from kapelle.services.policy.recording import EpisodeFile
    from kapelle.services.policy.serving import Limits, serve_policy
    from kapelle.training.served import open_served

    record = file_of(arguments.record)
    if record is not None:
        EpisodeFile(record, ()).close()  # raises where it cannot be written, before anything is loaded
    served = open_served(folder, Watch(Lines(sys.stderr)), which=which)
    name = _name(arguments.name or served.config.name)
    limits = Limits(arguments.calls, arguments.timeout, arguments.idle or SESSION_IDLE)
    return until_stopped(
        serve_policy(served.play, name, binding, limits, record),
        lambda server: f"{name} is served at {server.url}/v1 as {', '.join(server.models)}",
    )


def _reward(folder: Path, binding: Binding, arguments: argparse.Namespace) -> int:
    from kapelle.services.reward.serving import RewardLimits, serve_reward

    if arguments.record is not None:
        raise ConfigError("--record keeps what programs do with agents. Leave it out for a reward server.")
    scorer: Scorer
    if (folder / "config.json").is_file():
        from kapelle.services.reward.classifier import open_reward_model

        scorer = open_reward_model(folder, arguments.name)
    else:
        from kapelle.training.served_verifier import open_verifier

        scorer = open_verifier(folder, Watch(Lines(sys.stderr)), arguments.name)
    limits = RewardLimits(arguments.calls, arguments.batch, arguments.timeout)
    return until_stopped(
        serve_reward(scorer, binding, limits, arguments.grpc_port),
        lambda server: (
            f"{scorer.about()['name']} scores at {server.url}/v1/score"
            + (f" and, over gRPC, at {server.grpc.address}" if server.grpc else "")
        ),
    )


def until_stopped(
    serving: AbstractContextManager[D], where: Callable[[D], str], seconds: float = DRAIN_SECONDS
) -> int:
    """Serve, say where, and drain at a signal; return its exit code."""
    stop = threading.Event()
    with catch_interrupts(lambda _: stop.set()) as stopped, unbroken(), serving as server:
        say(where(server))
        stop.wait()
        say("stopping: what was accepted is answered first", sys.stderr)
        server.drain(seconds)
    return stopped.exit_code


def _name(name: str) -> str:
    """Return what clients call the team: a slash would part an agent from it."""
    return name.replace("/", "-")
