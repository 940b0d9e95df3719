"""Implements `kapelle compare`, which trains several algorithms on one recipe, with several seeds each, in parallel processes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from kapelle.cli.output import command
from kapelle.cli.quiet import hush
from kapelle.cli.stopping import exit_code
from kapelle.errors import ConfigError
from kapelle.runtime.console import say

FAILED = 2


def run(arguments: argparse.Namespace) -> int:
    """Train every algorithm with every seed, except runs that are finished, and print one table."""
    hush()
    from kapelle.cli.running import announce
    from kapelle.cli.source import read_recipe
    from kapelle.comparison.contenders import plan, read_contenders, read_own
    from kapelle.comparison.results import MISSING, can_draw, legend, standings, table
    from kapelle.comparison.running import RunningComparison, train_all
    from kapelle.runs.writer import new_path

    stream = sys.stderr if arguments.json else sys.stdout
    names = [name.strip() for name in arguments.algorithms.split(",") if name.strip()]
    if not names:
        raise ConfigError("Name the algorithms to compare, for example `--algorithms grpo,mappo`.")
    recipe = read_recipe(arguments.words, real=arguments.real)
    for note in recipe.notes:
        say(note, sys.stderr)
    contenders = read_contenders(recipe, names, read_own(arguments.set or ()))
    name = recipe.config.name
    folder = Path(arguments.run_dir) if arguments.run_dir else new_path(f"compare-{name}")
    comparison = RunningComparison(name, contenders, plan(contenders, arguments.seeds, folder), folder)
    announce("kapelle compare", as_json=arguments.json)
    say(f"{len(comparison.runs)} runs, kept in {comparison.folder}", stream)
    if not can_draw():
        later = command("plot", str(comparison.folder), "--output", "figure.pdf")
        say(f"No figures will be drawn. {MISSING} Later, `{later}` draws them.", stream)
    try:
        try:
            cores = len(os.sched_getaffinity(0))
        except AttributeError:  # on macOS
            cores = os.cpu_count() or 1
        train_all(comparison, arguments.jobs or cores, lambda line: say(line, stream))
    except KeyboardInterrupt:
        say(f"stopped; nothing is lost. Repeat the command with --run-dir {folder} to continue.", stream)
        return exit_code()
    result = comparison.write()
    measured = comparison.measure()
    if arguments.json:
        say(json.dumps(result | {"run_dir": str(comparison.folder)}))
    else:
        found = standings(comparison.contenders, measured)
        for line in ["", *table(found), legend(found)]:
            say(line)
    for why in dict.fromkeys(each.reason for each in measured if each.reason):
        alike = [f"{each.label} seed {each.seed}" for each in measured if each.reason == why]
        every = len(alike) == len(measured) > 1
        say(f"{f'all {len(alike)} runs' if every else ', '.join(alike)}: {why}", stream)
    wrong = [each for each in measured if each.error is not None]
    for each in wrong:
        say(f"{each.label} seed {each.seed} failed: {each.error}", stream)
    try:
        if files := comparison.draw():
            say(f"figures: {', '.join(map(str, files))}", sys.stderr)
    except ConfigError as error:  # the numbers are complete without the drawing
        say(str(error), sys.stderr)
    return FAILED if wrong else 0
