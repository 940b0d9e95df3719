"""`kapelle plot`: the figure for a paper, from results that are there."""

from __future__ import annotations

import argparse

from kapelle.cli.output import say
from kapelle.cli.quiet import hush


def run(arguments: argparse.Namespace) -> int:
    """Draw the results, and print the numbers that the figure shows."""
    hush()
    from kapelle.comparison import plot

    say(str(plot(arguments.results, arguments.output, against=arguments.against, seed=arguments.seed)))
    return 0
