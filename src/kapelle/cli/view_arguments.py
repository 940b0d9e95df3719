"""The arguments of `kapelle view`."""

from __future__ import annotations

import argparse

from kapelle.cli.serve_arguments import declare_binding


def declare_view(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "words", nargs="*", metavar="RUNS", help="run directories, or folders that hold some (runs)"
    )
    parser.add_argument(
        "--export", metavar="FILE", help="serve nothing; write one page of these runs that needs no server"
    )
    declare_binding(parser, 7860)
