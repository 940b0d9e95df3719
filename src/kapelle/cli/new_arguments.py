"""The arguments of `kapelle new`."""

from __future__ import annotations

import argparse

KINDS = ("environment", "workflow", "algorithm", "project")


def declare_new(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("kind", metavar="KIND", help=f"what to begin: {', '.join(KINDS)}")
    parser.add_argument(
        "name", metavar="NAME", help="its name, such as word_count: a new folder of that name is made here"
    )


NEW = (
    "environment|workflow|algorithm|project NAME",
    "write a working start of a piece of your own, with a test and a recipe",
    "new",
    declare_new,
)
"""Usage, summary, module and arguments of the command."""
