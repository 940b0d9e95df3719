"""Implements `kapelle arena`, in which every pair of players plays the same deals in every role."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from kapelle.cli.quiet import hush
from kapelle.cli.stopping import exit_code
from kapelle.runtime.console import say

_KEY = re.compile(r"(\w+)\.[\w.]+=")
FAILED = 2
"""The exit code if every episode failed."""


def run(arguments: argparse.Namespace) -> int:
    """Roll out the games of the missing pairs, and print the ratings."""
    hush()
    from kapelle.comparison.arena import PAIRS, arena, draw
    from kapelle.errors import ConfigError
    from kapelle.runs.writer import new_path
    from kapelle.settings.schema import RunConfig

    # NAME=PLAYER is not a setting: settings begin with a section of a run and a dot.
    settings = [
        word
        for word in arguments.words
        if (key := _KEY.match(word)) is not None and key[1] in RunConfig.model_fields
    ]
    players = [word for word in arguments.words if word not in settings]
    folder = Path(arguments.output) if arguments.output else new_path("arena")
    stream, before = sys.stderr, len(list((folder / PAIRS).glob("*.json")))
    try:
        result = arena(
            *players,
            environment=arguments.environment,
            settings=settings,
            games=arguments.games,
            jobs=arguments.jobs,
            seed=arguments.seed,
            output=folder,
            report=lambda line: say(line, stream),
        )
    except KeyboardInterrupt:
        say(
            f"stopped; finished pairs are kept. Repeat the command with --output {folder} to continue.",
            stream,
        )
        return exit_code()
    except Exception:
        if len(list((folder / PAIRS).glob("*.json"))) > before:
            say(f"Finished pairs are kept. Repeat the command with --output {folder} to continue.", stream)
        raise
    if arguments.json:
        say(json.dumps(result.row()))
    else:
        say(str(result))
    try:
        picture = f", picture: {draw(folder, result)}"
    except ConfigError as error:  # the numbers are complete without the picture
        say(str(error), stream)
        picture = ""
    say(f"kept in {folder}{picture}", stream)
    total = sum(len(deal) for met in result.meetings.values() for deal in met.games)
    return FAILED if result.failed == total else 0
