"""`kapelle serve`: offer what a run has learned to other programs."""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

from kapelle.cli.lines import Lines
from kapelle.cli.output import say
from kapelle.cli.parser import split_words
from kapelle.cli.progress import Watch
from kapelle.cli.quiet import hush
from kapelle.errors import ConfigError, did_you_mean
from kapelle.runs.reader import read_config
from kapelle.runtime.interrupts import catch_interrupts, unbroken

KINDS = ("policy",)
DRAIN_SECONDS = 600.0
"""For which accepted calls may still be answered after a signal."""


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal asks to stop; then answer what was accepted and return the signal's exit code."""
    named, settings = split_words(arguments.words)
    if len(named) != 2 or named[0] not in KINDS or settings:
        hint = did_you_mean(named[0], KINDS) if named and named[0] not in KINDS else ""
        raise ConfigError(f"Name what to serve and a run directory: `kapelle serve policy RUN`.{hint}")
    from kapelle.services.binding import Binding, token_here
    from kapelle.services.http.server import check_installed

    check_installed()
    binding = Binding(
        arguments.host,
        arguments.port,
        token_here(),
        _file(arguments.tls_cert),
        _file(arguments.tls_key),
        tuple(arguments.allow_host),
    )
    folder = Path(named[1])
    read_config(folder)  # raises when there is no run
    hush()
    from kapelle.services.policy.serving import Limits, serve_policy
    from kapelle.training.served import open_served

    served = open_served(folder, Watch(Lines(sys.stderr)))
    name = _name(arguments.name or served.config.name)
    stop = threading.Event()
    limits = Limits(arguments.calls, arguments.timeout)
    with (
        catch_interrupts(lambda _: stop.set()) as stopped,
        unbroken(),
        serve_policy(served.play, name, binding, limits, _file(arguments.record)) as server,
    ):
        say(f"{name} is served at {server.url}/v1 as {', '.join(server.models)}")
        stop.wait()
        say("stopping: what was accepted is answered first", sys.stderr)
        server.drain(DRAIN_SECONDS)
    return stopped.exit_code


def _file(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def _name(name: str) -> str:
    """Return what clients call the team: a slash would part an agent from it."""
    return name.replace("/", "-")
