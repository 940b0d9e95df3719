"""`kapelle compare`: several algorithms on one recipe, several seeds each, in parallel processes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kapelle.cli.output import command, say
from kapelle.cli.quiet import hush
from kapelle.cli.stopping import exit_code
from kapelle.errors import ConfigError

if TYPE_CHECKING:
    from kapelle.comparison.running import Comparison

FAILED = 2
LEGEND = (
    "median [quartiles] over seeds: success (over the problems that were scored) and return on unseen problems, tokens "
    "sampled to train"
)


def run(arguments: argparse.Namespace) -> int:
    """Train every algorithm with every seed, except runs that are done already, and print one table."""
    hush()
    from kapelle.cli.running import announce
    from kapelle.comparison.results import standings, table
    from kapelle.comparison.running import train_all

    stream = sys.stderr if arguments.json else sys.stdout
    comparison = _comparison(arguments)
    announce("kapelle compare", as_json=arguments.json)
    say(f"{len(comparison.runs)} runs, kept in {comparison.folder}", stream)
    try:
        train_all(comparison, arguments.jobs or cores(), lambda line: say(line, stream))
    except KeyboardInterrupt as stop:
        say(f"stopped; nothing is lost. Continue with: {_again(arguments, comparison.folder)}", stream)
        return exit_code(stop)
    result = comparison.write()
    measured = comparison.measure()
    if arguments.json:
        say(json.dumps(result | {"run_dir": str(comparison.folder)}))
    else:
        for line in ["", *table(standings(comparison.contenders, measured)), LEGEND]:
            say(line)
    for why in dict.fromkeys(each.reason for each in measured if each.reason):
        say(
            f"{', '.join(f'{each.label} seed {each.seed}' for each in measured if each.reason == why)}: {why}",
            stream,
        )
    wrong = [each for each in measured if each.error is not None]
    for each in wrong:
        say(f"{each.label} seed {each.seed} failed: {each.error}", stream)
    _draw(comparison)
    return FAILED if wrong else 0


def _comparison(arguments: argparse.Namespace) -> Comparison:
    from kapelle.cli.source import read_recipe
    from kapelle.comparison.contenders import plan, read_contenders, read_own
    from kapelle.comparison.running import Comparison
    from kapelle.runs.writer import new_path

    names = [name.strip() for name in arguments.algorithms.split(",") if name.strip()]
    if not names:
        raise ConfigError("No algorithm is named. Write for example `--algorithms grpo,mappo`.")
    recipe = read_recipe(arguments.words, real=arguments.real)
    for note in recipe.notes:
        say(note, sys.stderr)
    contenders = read_contenders(recipe, names, read_own(arguments.set or ()))
    name = recipe.config.name
    folder = Path(arguments.run_dir) if arguments.run_dir else new_path(f"compare-{name}")
    return Comparison(name, contenders, plan(contenders, arguments.seeds, folder), folder)


def _draw(comparison: Comparison) -> None:
    """Draw the curves, or print why that is not possible: the numbers are there either way."""
    try:
        say(f"curves: {comparison.draw()}", sys.stderr)
    except ConfigError as error:
        say(str(error), sys.stderr)


def _again(arguments: argparse.Namespace, folder: Path) -> str:
    own = [word for setting in arguments.set or () for word in ("--set", setting)]
    real = ["--real"] if arguments.real else []
    words = [*arguments.words, *real, "--algorithms", arguments.algorithms, "--seeds", str(arguments.seeds)]
    return command("compare", *words, *own, "--run-dir", str(folder))


def cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1
