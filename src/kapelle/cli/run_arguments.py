"""The arguments of `kapelle runs`."""

from __future__ import annotations

import argparse


def declare_runs(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "action", nargs="?", metavar="ls|show|rollback", help="list runs, show one, or go back in one"
    )
    parser.add_argument(
        "place", nargs="?", metavar="RUN", help="a run directory; for ls a folder of them (runs)"
    )
    parser.add_argument(
        "--to", type=int, metavar="STEP", help="rollback: the step of the checkpoint to go back to"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="rollback: show what would be moved, and move nothing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
