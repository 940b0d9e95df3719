"""Implements `kapelle plot`, which draws a figure for a paper from existing results."""

from __future__ import annotations

import argparse

from kapelle.cli.quiet import hush
from kapelle.runtime.console import say


def run(arguments: argparse.Namespace) -> int:
    """Draw the figure of the results, and print the numbers that it shows."""
    hush()
    from kapelle.comparison import plot

    drawn = plot(
        arguments.results,
        arguments.output,
        against=arguments.against,
        metric=arguments.metric,
        seed=arguments.seed,
    )
    say(str(drawn))
    return 0
